"""Speech from espeak-ng, called through ctypes: the library of the wheel `espeakng-loader`, else that of the system."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
from pathlib import Path
from typing import Any

import numpy as np

# Of espeak-ng's speak_lib.h.
_SYNCHRONOUS = 2  # no thread of its own, which would make the order of calls a matter of luck
_NO_EXIT = 0x8000
_UTF8 = 1
_RATE, _PITCH, _RANGE = 1, 3, 4
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


@functools.cache
def synthesizer() -> Espeak:
    """The one synthesizer of this process: the library keeps global state and must be started once only."""
    return Espeak()


class Espeak:
    """espeak-ng; get it from `synthesizer`.

    sample_rate: of the samples that `speak` returns, in Hz. Raises ValueError where espeak-ng cannot be loaded.
    """

    def __init__(self) -> None:
        self._library, data = _load()
        self.sample_rate = int(
            self._library.espeak_Initialize(_SYNCHRONOUS, 0, str(data).encode() if data else None, _NO_EXIT)
        )
        if self.sample_rate <= 0:
            raise ValueError(
                f"espeak-ng could not read its data ({data or 'of the system'}). Reinstall espeakng-loader."
            )
        if hasattr(self._library, "espeak_ng_SetRandSeed"):  # seeded by the clock otherwise
            self._library.espeak_ng_SetRandSeed(ctypes.c_long(1))
        self._pieces: list[np.ndarray] = []
        self._callback = _CALLBACK(self._receive)  # kept: the library holds only a pointer to it
        self._library.espeak_SetSynthCallback(self._callback)
        self._library.espeak_Synth.argtypes = [
            ctypes.c_char_p,
            ctypes.c_size_t,
            ctypes.c_uint,
            ctypes.c_int,
            ctypes.c_uint,
            ctypes.c_uint,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]

    def _receive(self, samples: Any, number: int, _events: Any) -> int:
        if samples and number > 0:
            self._pieces.append(np.ctypeslib.as_array(samples, shape=(number,)).copy())
        return 0

    def speak(self, text: str, voice: str, rate: int, pitch: int, pitch_range: int = 50) -> np.ndarray:
        """Samples (N,) int16 of a text. rate: words per minute; pitch and pitch_range: 0 to 100.

        They depend a little on what was spoken before in this process: the library keeps phases and random states.
        voice: such as "gmw/en-US+f3" (language + variant). Raises ValueError for a language that is not there.
        """
        if self._library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise ValueError(f"espeak-ng has no voice {voice!r}.")
        for parameter, value in ((_RATE, rate), (_PITCH, pitch), (_RANGE, pitch_range)):
            self._library.espeak_SetParameter(parameter, value, 0)
        self._pieces = []
        encoded = text.encode("utf-8")
        if self._library.espeak_Synth(encoded, len(encoded) + 1, 0, 1, 0, _UTF8, None, None) != 0:
            raise ValueError(f"espeak-ng could not speak {text!r}.")
        self._library.espeak_Synchronize()
        return np.concatenate(self._pieces) if self._pieces else np.zeros(0, dtype=np.int16)


def _load() -> tuple[Any, Path | None]:
    """The library and the folder of its data, None where the library knows that itself."""
    try:
        import espeakng_loader
    except ImportError:
        name = ctypes.util.find_library("espeak-ng")
        if name is None:
            raise ValueError(
                "The synthetic corpus needs espeak-ng: run `pip install espeakng-loader`, "
                "or install the library espeak-ng of your system."
            ) from None
        return ctypes.CDLL(name), None
    try:
        return ctypes.CDLL(espeakng_loader.get_library_path()), Path(espeakng_loader.get_data_path())
    except OSError as error:
        name = ctypes.util.find_library("espeak-ng")
        if name is None:
            raise ValueError(
                f"The library of espeakng-loader does not load here ({error}): install espeak-ng of your system."
            ) from error
        return ctypes.CDLL(name), None
