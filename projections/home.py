"""Where each fact stands: the one subject on which it is believed.

Who may publish what is settled by subject, so a fact about one thing on the subject of another proves nothing: an
operator who may write commands cannot end a job with one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpukeeper.events import subjects
from gpukeeper.events.catalog import FACTS
from gpukeeper.events.codec import Event
from gpukeeper.events.errors import InvalidId
from gpukeeper.events.fact import Fact

#: By the second word of a fact's tag. A command stands on the subject of whoever gave it.
_SUBJECTS: dict[str, Callable[[Any], str | None]] = {
    "job": lambda fact: subjects.job(fact.job),
    "route": lambda fact: subjects.route(fact.host, fact.job),
    "device": lambda fact: subjects.device(fact.host, fact.device),
    "runtime": lambda fact: subjects.runtime(fact.host, fact.runtime),
    "host": lambda fact: subjects.host(fact.host),
    "site": lambda _: subjects.SITE,
    "operator": lambda _: None,
}
_SUBJECT_OF = {fact: _SUBJECTS[fact.TYPE.split(".")[1]] for fact in FACTS}


def home_of(fact: Fact) -> str | None:
    """The subject that ``fact`` belongs on; None for a command, which stands on its actor's.

    Raises:
        InvalidId: it names something that cannot be part of a subject.
    """
    return _SUBJECT_OF[type(fact)](fact)


def is_at_home(event: Event) -> bool:
    """Whether a fact stands where facts of its kind about that very thing stand. What is no fact always does."""
    fact = event.data
    if not isinstance(fact, Fact):
        return True
    subject = event.stored.subject
    try:
        home = home_of(fact)
    except InvalidId:
        return False
    return subject.startswith(subjects.COMMAND_PREFIX) if home is None else subject == home
