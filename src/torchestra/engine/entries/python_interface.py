"""The functions of Python's C interface that entries call. Objects are words: their addresses."""

from __future__ import annotations

from torchestra.engine.native.declarations import External

call_object = External("PyObject_Vectorcall", "i64", "i64", "i64", "i64", "i64")
"""Call an object with arguments at an address, their number, and the names of the last; 0: it has raised."""
tuple_length = External("PyTuple_Size", "i64", "i64")
list_length = External("PyList_Size", "i64", "i64")
list_as_tuple = External("PyList_AsTuple", "i64", "i64")
list_item = External("PyList_GetItem", "i64", "i64", "i64")
dict_item = External("PyDict_GetItem", "i64", "i64", "i64")
add_reference = External("Py_IncRef", "void", "i64")
drop_reference = External("Py_DecRef", "void", "i64")
int_of = External("PyLong_FromSsize_t", "i64", "i64")
word_of = External("PyLong_AsLongLongAndOverflow", "i64", "i64", "i64")
"""Return the value of an int; at the address, 4 bytes say that there is none of 64 bits."""
clear_error = External("PyErr_Clear", "void")
fetch_error = External("PyErr_Fetch", "void", "i64", "i64", "i64")
normalize_error = External("PyErr_NormalizeException", "void", "i64", "i64", "i64")
restore_error = External("PyErr_Restore", "void", "i64", "i64", "i64")
release_interpreter = External("PyEval_SaveThread", "i64")
take_interpreter = External("PyEval_RestoreThread", "void", "i64")
