"""Modules that take another's place: what users hang on theirs, which a stand-in cannot keep or has to take over."""

from torch import nn

from loka.core.errors import InvalidInput

_TAKEN_OVER = "_taken_over"  # on a stand-in, the names of attributes that it has from the module in whose place it is
_NOT_TAKEN = ("forward", "_compiled_call_impl", _TAKEN_OVER)  # which run the old module


def why_not_stood_in_for(module: nn.Module) -> str | None:
    """Why nothing can take the place of a linear layer, norm or activation: it holds more than a weight and a bias."""
    beside = [name for name in (*module._parameters, *module._buffers, *module._modules) if name not in ("weight", "bias")]
    if not beside:
        return None
    return f"holds {', '.join(beside)} too, which a module in its place would not: put that into a module around it"


def take_over(old: nn.Module, new: nn.Module) -> None:
    """Give ``new``, which takes the place of ``old``, the plain attributes that users put on that: their forwards read them."""
    known = {*vars(nn.Module()), *getattr(old, "__constants__", ()), *_NOT_TAKEN}
    _give(old, new, tuple(name for name in vars(old) if name not in known))


def pass_on(stand_in: nn.Module, new: nn.Module) -> None:
    """Give what ``stand_in`` took over, as it is now, to what takes its place in turn."""
    _give(stand_in, new, vars(stand_in).get(_TAKEN_OVER, ()))


def give_back_attributes(stand_in: nn.Module, original: nn.Module) -> None:
    """Give what ``stand_in`` took over, as it is now, to the module in whose place it was."""
    names = vars(stand_in).get(_TAKEN_OVER, ())
    vars(original).update({name: vars(stand_in)[name] for name in names if name in vars(stand_in)})


def _give(old: nn.Module, new: nn.Module, names: tuple[str, ...]) -> None:
    if taken := next((name for name in names if hasattr(new, name)), None):
        raise InvalidInput(f"has an attribute {taken!r}, which the {type(new).__name__} in its place has too: rename it")
    if names:
        vars(new).update({name: vars(old)[name] for name in names if name in vars(old)}, **{_TAKEN_OVER: names})
