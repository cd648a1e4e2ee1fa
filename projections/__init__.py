"""Folds over the log: what is true now, and nothing that the log does not say.

What holds in this package:

- A fold is total: every stored event moves it one sequence on, whatever the event holds. Guards live in decisions.
- A fold reads no clock. Ages come from the server's timestamps of the events.
- Records are frozen and replaced whole; the dictionaries that hold them have one writer, :class:`.site.Site`.
- full fold == snapshot + tail == fold in any batches; seeing an event twice changes nothing.
- Only ``runner.py`` and ``snapshot.py`` do I/O.
"""
