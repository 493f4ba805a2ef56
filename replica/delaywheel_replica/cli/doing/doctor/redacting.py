"""Takes secrets out of texts that others are to read.

Two nets, one behind the other. What is known to be a secret here is looked for as it is, in the
forms in which programs write it: the settings of Kafka's client that are not known to be harmless,
variables of the environment by their names, this user's token. And by form: what stands behind a
telling name, keys, tokens, the user of a URL and its query. Too much is hidden rather than too
little: a path behind `tokens` is.
"""

from __future__ import annotations

import json
import os
import re
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from delaywheel.client.profiles import VARIABLES
from delaywheel_replica.config import Config
from delaywheel_replica.hiding import HIDDEN, is_secret

_SHORT: Final = 4
"""Shorter values stand in every text; by form they are found all the same."""

_TELLING: Final = (
    r"pass(?:word|wd|phrase|code|\b)|\bpwd?\b|secret|token|credential|cookie|authori[sz]ation"
    r"|signature|\bsig\b|\bx-auth|\bsession[_-]?id|\bsid\b|jaas"
    r"|(?:api|access|private|account|shared|encryption)[_.\-]?key"
)
_NAMES: Final = re.compile(rf"(?i){_TELLING}|_KEY$|_SAS$|_DSN$")
_NAME: Final = rf"(?:{_TELLING})[\w.-]{{0,64}}(?:\\?[\"'`])?"
_OPTION: Final = rf"--?[\w-]{{0,64}}(?:{_TELLING})[\w-]{{0,64}}"
_WHOSE: Final = r"(?:[ \t]+(?:for|of|at|on|in)(?:[ \t]+[^\s=]{0,63}[^\s:=]){1,6}?)?"
_NEXT_LINE: Final = r"(?:[ \t]*(?:\r?\n|\\{1,8}[rn])){1,3}[ \t]*"
_ALONE: Final = (
    r"(\\?\"[^\n]*\"|'[^\n]*'|\S+)(?=[ \t,]{0,64}(?:\r?$|\\{1,8}[rn]|[\"'](?:[\s,}]|$)))"
)
_VALUE: Final = (
    r"(\\\"(?:[^\"\\\n]|\\[^\"\n])*\\\"|b?\"(?:[^\"\\\n]|\\.)*\"|b?'(?:[^'\\\n]|\\.)*'"
    r"|[\"'][^\n]*|[^\s,;&}\]\"'\\)]+)"
)
_CONTENT: Final = re.compile(
    rf"(?im)((?:^|[ \t{{,(\"'])(?:key|value|headers?|body|payload)\\?[\"']?[ \t]*[:=][ \t]*)"
    rf"([\[{{][^\]}}\n]*[\]}}]|{_VALUE[1:]}"
)


def _hidden(match: re.Match[str]) -> str:
    """Hides the value behind a name, and leaves its quotation marks."""
    mark = re.match(r"\\?[\"']?", match[2])
    return f"{match[1]}{mark[0] if mark else ''}{HIDDEN}{mark[0] if mark else ''}"


_FORMS: Final = tuple(
    (re.compile(form), shown)
    for form, shown in (
        (r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?s:.*?)(?:-----END [A-Z ]*-----|\Z)", HIDDEN),
        # Whole headers: what comes behind the first word of them is as secret.
        (
            r"(?i)\b((?:cookie|authorization)[ \t]*:(?:[ \t]*\r?\n[ \t])?[ \t]*)[^\n\"']+",
            rf"\1{HIDDEN}",
        ),
        (r"\beyJ[\w-]{8,}\.[\w-]+\.?[\w-]*", HIDDEN),
        (r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b", HIDDEN),
        (r"\b[0-9a-fA-F]{48,}\b", HIDDEN),  # an id has 32
        (r"(?i)\b(bearer|basic|digest|negotiate)([ :=]+)[\w.~+/=-]{4,}", rf"\1\2{HIDDEN}"),
        # Passwords in it may have a slash, if somebody forgot to write it as %2F.
        (r"(\b[a-zA-Z][\w+.-]{0,64}://)[^\s\"'<>]{0,512}@", rf"\1{HIDDEN}@"),
        (r"(?<![\w.:/@+*-])([\w.+-]{1,64}:)[^\s\"'<>@/]{1,256}@(?=[\w\[])", rf"\1{HIDDEN}@"),
        (r"(\b[a-zA-Z][\w+.-]{0,64}://[^\s\"'?#<>]{0,1024})[?#][^\s\"'<>]+", rf"\1?{HIDDEN}"),
        # name: and the value alone on the next line, which may be of a text within a text.
        (
            (
                rf"(?im)({_NAME}{_WHOSE}[ \t]*(?:=>|[:=]|[ \t](?:is|was):?)[ \t]*[|>]?[+-]?"
                rf"{_NEXT_LINE})(?![\[{{<]|\S{{0,64}}{_NAME}[:=]){_ALONE}"
            ),
            _hidden,
        ),
        # Arguments, one a line, also of a list.
        (
            (
                rf"(?im)((?:(?<![\w-])|(?<=\\[rn])){_OPTION}(?:\\?[\"'])?,?"
                rf"{_NEXT_LINE}(?:-[ \t]+)?)(?!-){_ALONE}"
            ),
            _hidden,
        ),
        # As programs write them: name=value, "name": "value", name 'value', --name value, and
        # "--name", "value".
        # What stands before a name may be long, and is not looked at from each of its places.
        (
            (
                rf"(?i)({_NAME}[ \t]*(?:=>|[:=]|%3[Dd]|[ \t](?=[\"']))[ \t]*"
                rf"|(?<!-){_OPTION}(?:[ \t]+|\\?[\"'],[ \t]*)){_VALUE}"
            ),
            _hidden,
        ),
        # As people say it: name for user is value; but not what else is said of secrets.
        (
            (
                rf"(?i)({_NAME}{_WHOSE}(?:[ \t]*[:=]|[ \t]+(?:is|was)"
                r"(?:[ \t]+(?:now|set[ \t]+to))?(?:[ \t]*:|[ \t]))[ \t]*)"
                r"(?!(?:not?|none|null|true|false|an?|the|too|(?:in)?valid|missing|present|wrong"
                r"|(?:in)?correct|malformed|mandatory|required|needed|optional|empty|expired"
                r"|(?:un)?known|(?:un)?set|used|taken|rejected|refused|revoked|of|for|in|from|by|now"
                r"|already|only|never|still)"
                rf"[.,;:!?)]*(?:[\s\"'\\]|$)){_VALUE}"
            ),
            _hidden,
        ),
    )
)


_CUT_KEY: Final = re.compile(
    r"\A(?:[A-Za-z0-9+/=]+\r?\n){1,200}[A-Za-z0-9+/=]*-----END [A-Z ]*PRIVATE KEY-----"
)
"""The end of one whose beginning is before the last lines of a log."""


class Redactor:
    """Hides secrets in texts."""

    def __init__(self, config: Config) -> None:
        forms = {form for secret in _known(config) for form in _forms(secret)}
        whole = "|".join(map(re.escape, sorted(forms, key=len, reverse=True)))
        self._known = re.compile(whole) if whole else None

    def text(self, text: str) -> str:
        """Returns a text without them."""
        if self._known is not None:
            text = self._known.sub(HIDDEN, text)
        for form, shown in _FORMS:
            text = form.sub(shown, text)
        return text

    def document(self, value: Any, name: str = "") -> Any:
        """Returns plain values without them; what has a telling name is hidden whole."""
        if isinstance(value, str):
            return HIDDEN if _NAMES.search(name) else self.text(value)
        if isinstance(value, dict):
            return {key: self.document(one, key) for key, one in value.items()}
        return [self.document(one) for one in value] if isinstance(value, list) else value

    def log(self, text: str) -> str:
        """Returns lines of a log without them, and without what may be of a message."""
        return _CONTENT.sub(_hidden, self.text(_CUT_KEY.sub(HIDDEN, text)))


def _known(config: Config) -> Iterator[str]:
    for name, value in config.kafka.items():
        if is_secret(name):
            yield value
    for name, value in os.environ.items():
        if _NAMES.search(name) and not name.endswith(("_FILE", "_PATH", "_LOCATION")):
            yield value
    token_file = os.environ.get(VARIABLES["token_file"])
    if token_file:
        try:
            yield Path(token_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return


def _forms(secret: str) -> Iterator[str]:
    """Returns a secret as programs write it; each line of one that has several, too."""
    for part in {secret.strip(), *map(str.strip, secret.splitlines())}:
        if len(part) >= _SHORT and not part.startswith("-----"):
            encoded = b64encode(part.encode()).decode()
            yield from (
                part,
                json.dumps(part)[1:-1],
                repr(part)[1:-1],
                quote(part, safe=""),
                encoded,
            )
