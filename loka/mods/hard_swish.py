"""No exponential: SiLU → hard-swish."""

from torch import nn

from loka.mods.contract import MODS, Place, why_not_replaced, why_not_this_type


@MODS.register("hard_swish")
class HardSwish:
    """x·sigmoid(x) → x·relu6(x + 3)/6: a few multiply-adds that fuse behind the norm and never exceed their input."""

    default = True
    order = 1
    replaces = True
    functions = frozenset({"silu"})

    def concerns(self, place: Place) -> bool:
        return isinstance(place.module, nn.SiLU) or type(place.module).__name__ in ("Swish", "SiLU")

    def why_not(self, place: Place) -> str | None:
        return why_not_this_type(place.module, nn.SiLU) or why_not_replaced(place.module)

    def change(self, place: Place) -> tuple[str, str]:
        return "SiLU", "Hardswish"

    def removes(self, place: Place) -> tuple[str, ...]:
        return ()

    def replace(self, place: Place) -> nn.Module:
        return nn.Hardswish(inplace=bool(getattr(place.module, "inplace", False)))
