"""The authority over one host: its devices, its runtimes, and the work that runs there.

What holds in this package:

- Only runtimes of the registry are ever touched.
- Every admission is decided again on live readings, just before acting.
- Nothing is sent to a runtime before the device claim, the job's admission, the placement check and `started`
  are stored in the log.
- Unknown is a value: unknown memory is not free, unknown residency is not a pass, unknown activity is not idle.
"""
