"""Formats of checkpoints, one in each module, recognised and read one tensor at a time; no code of a file runs.

To read ``PATH``, the formats are tried in the order of their ``FORMAT.order``, lowest first. The first whose
``recognises(PATH)`` is true opens it: ``open_state(PATH, asked)`` returns a
:class:`fleet.checkpoint.conversion.whole_state.WholeState`, which knows all names and shapes and reads a tensor on
request. A format that looks into a file comes before formats that look at its name.

A file is data from a stranger. No module unpickles it, imports a name from it, or calls a name in it: pickles go
through ``conversion.plain_pickle``, files of torch through ``torch_file.load_plain``. Damage is a CheckpointError.

To add a format, put a module here with ``FORMAT``, ``recognises`` and ``open_state``; with ``FORMAT.to`` set and
``write_state`` it is a target as well. ``--help``, ``--to`` and the error about an unknown source follow from
``FORMAT``; its test and its row in docs/guides/checkpoint.md go with it. ``state_of_tree()`` makes a state of a
dictionary of tensors in memory. A source that reads lazily makes a ``WholeState`` itself, as ``hugging_face`` does:
names ``KEY/NAME`` with the key that was asked for, ``kinds`` of the keys, and ``read``.
"""
