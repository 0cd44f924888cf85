from asr.encoders.zipformer.zipformer import Zipformer as Zipformer
