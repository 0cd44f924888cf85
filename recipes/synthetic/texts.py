"""What the synthetic speakers say: numbers, times, dates, short commands and sentences, in English and Mandarin."""

from __future__ import annotations

import random
from collections.abc import Callable

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
HOURS = (*DIGITS[1:], "ten", "eleven", "twelve")
TENS = ("twenty", "thirty", "forty", "fifty")
ORDINALS = ("first", "second", "third")
MONTHS = ("march", "may", "june", "july", "october")
PLACES = ("kitchen", "bedroom", "hall")
DEVICES = ("light", "lamp", "radio")
OPENINGS = ("door", "window")


def _number(pick: random.Random) -> str:
    return f"{pick.choice(TENS)} {pick.choice(DIGITS[1:])}" if pick.random() < 0.6 else pick.choice((*HOURS, *TENS))


def _time(pick: random.Random) -> str:
    hour = pick.choice(HOURS)
    return pick.choice(
        (f"half past {hour}", f"quarter to {hour}", f"{hour} {_number(pick)}", f"{_number(pick)} past {hour}")
    )


def _date(pick: random.Random) -> str:
    return f"the {pick.choice(ORDINALS)} of {pick.choice(MONTHS)}"


def _device(pick: random.Random) -> str:
    return f"the {pick.choice(DEVICES)} in the {pick.choice(PLACES)}"


ENGLISH: tuple[Callable[[random.Random], str], ...] = (
    lambda pick: " ".join(pick.choice(DIGITS) for _ in range(pick.randint(3, 7))),
    lambda pick: " ".join(pick.choice(DIGITS) for _ in range(pick.randint(3, 7))),
    lambda pick: f"{_number(pick)} {pick.choice(('and', 'to'))} {_number(pick)}",
    lambda pick: f"it is {_time(pick)}",
    lambda pick: f"wake me up at {_time(pick)}",
    lambda pick: f"call {pick.choice(('home', 'me'))} on {_date(pick)}",
    lambda pick: f"{_date(pick)} at {_time(pick)}",
    lambda pick: f"turn {pick.choice(('on', 'off'))} {_device(pick)}",
    lambda pick: f"{pick.choice(('open', 'close'))} the {pick.choice(OPENINGS)} in the {pick.choice(PLACES)}",
    lambda pick: (
        f"set {pick.choice(('the timer', 'the alarm'))} for {pick.choice(TENS)} {pick.choice(DIGITS[1:])} minutes"
    ),
    lambda pick: f"please {pick.choice(('play', 'stop'))} the music at {_time(pick)}",
    lambda pick: f"what time is it in the {pick.choice(PLACES)}",
)

ZH_DIGITS = "零一二三四五六七八九"
ZH_HOURS = ("一", "两", "三", "四", "五", "六", "七", "八", "九", "十")
ZH_PLACES = ("客厅", "厨房", "房间")
ZH_DEVICES = ("灯", "音乐", "电视")


def _zh_number(pick: random.Random) -> str:
    return f"{pick.choice(ZH_DIGITS[2:6])}十{pick.choice(ZH_DIGITS[1:])}"


def _zh_time(pick: random.Random) -> str:
    return f"{pick.choice(('上午', '下午'))}{pick.choice(ZH_HOURS)}点{pick.choice(('', '半', _zh_number(pick) + '分'))}"


def _zh_date(pick: random.Random) -> str:
    day = pick.choice(("", "十", "二十")) + pick.choice(ZH_DIGITS[1:])
    return f"{pick.choice(ZH_DIGITS[1:])}月{day}号"


MANDARIN: tuple[Callable[[random.Random], str], ...] = (
    lambda pick: "".join(pick.choice(ZH_DIGITS) for _ in range(pick.randint(3, 8))),
    lambda pick: f"现在是{_zh_time(pick)}",
    lambda pick: f"今天是{_zh_date(pick)}",
    lambda pick: f"{_zh_date(pick)}{_zh_time(pick)}叫我",
    lambda pick: f"请{pick.choice(('打开', '关上'))}{pick.choice(ZH_PLACES)}的{pick.choice(ZH_DEVICES)}",
    lambda pick: f"{pick.choice(('打开', '关上'))}{pick.choice(ZH_PLACES)}的门",
    lambda pick: f"{_zh_number(pick)}分钟以后叫我",
)

SENTENCES = {"en": ENGLISH, "zh": MANDARIN}


def sentence(language: str, pick: random.Random) -> str:
    """A random sentence: English in lower case with spaces, Mandarin without spaces."""
    return pick.choice(SENTENCES[language])(pick)
