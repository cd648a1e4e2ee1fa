"""Facts, and how they are stored.

What holds in this package:

- A fact is a frozen record of something that happened; its tag is the ``type`` of the CloudEvents envelope around it.
- Schemas only grow. New fields have defaults, types never change, a retired tag is never used again.
- What is unknown (types, fields of a newer version) is carried, never dropped, and never a crash.
- Only ``jetstream.py`` and ``streams.py`` talk to NATS; every other module here does no I/O.
"""
