"""What can be wrong with a net, its weights or its data; messages name the file, the place and the limit.

PrototxtError
|- ParseError      the text is no valid prototxt, or the file cannot be read
|- NetError        the layers do not fit together, or a call does not fit the net
|  `- LayerError   one layer's parameters are wrong
|     `- PythonLayerError   a layer's own Python code cannot be loaded or has failed
|- WeightsError    a weight, state or mean file cannot be read, written or matched
`- DataError       a data source cannot be read or holds what the net cannot take
"""


class PrototxtError(ValueError):
    """Any failure of this package that the caller's files or arguments cause."""


class ParseError(PrototxtError):
    """The text is no valid prototxt, or the file cannot be read."""


class NetError(PrototxtError):
    """The layers do not fit together, or a call does not fit the net."""


class LayerError(NetError):
    """One layer's parameters or bottoms are wrong."""


class PythonLayerError(LayerError, RuntimeError):
    """A Python layer's code cannot be loaded or has failed; the cause is what it raised.

    A RuntimeError too, as scripts for the original expect of a layer that raises one.
    """


class WeightsError(PrototxtError):
    """A weight, state or mean file cannot be read, written or matched."""


class DataError(PrototxtError):
    """A data source cannot be read, or holds what the net cannot take."""


def first_line(error: BaseException) -> str:
    """What a library's error says, in one line for a message; its type where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]
