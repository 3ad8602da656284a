"""Finding blocks in a user's model: for every linear layer the norm and activation behind it, and who reads the result.

Probe stores these neighbours, Dispatch fuses what they allow, Mods ask them which layers are prediction heads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from loka.core.errors import UnknownName
from loka.core.site_record import NEVER_CALLED, UNKNOWN_READER
from loka.nn.block_norm import BlockNorm
from loka.nn.graph import Call, Graph, Kind, Method, changes_shape_alone
from loka.nn.graph_run import record_run
from loka.nn.graph_trace import trace
from loka.nn.unwrap import Arguments, Example, arguments_of, unwrapped

# What turns logits into probabilities belongs to the head in front of it.
_OUTPUT_ACTIVATIONS = {"sigmoid", "softmax", "log_softmax", "logsigmoid", "LogSigmoid", "Sigmoid", "Softmax", "LogSoftmax"}
_PRODUCTS = {
    *("linear", "addmm", "matmul", "mm", "mv", "bmm", "baddbmm", "einsum", "tensordot", "bilinear"),
    *("conv1d", "conv2d", "conv3d", "scaled_dot_product_attention", "multi_head_attention_forward"),
}
_PRODUCT_MODULES = (
    *(nn.MultiheadAttention, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase),
    *(nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
)
_SCALINGS = {"add", "sub", "mul", "div", "truediv", "neg"}
_LEARNED_FUNCTIONS = {"linear", "addmm", "bilinear", "embedding", "embedding_bag", "conv1d", "conv2d", "conv3d"}


@dataclass(frozen=True)
class Follower:
    """A norm or an activation behind a site."""

    kind: str  # LayerNorm, or layer_norm where it is a function
    module: str | None  # fully qualified name; None for a function, which cannot be swapped
    block: int | None = None  # of a BlockNorm
    eps: float | None = None


@dataclass(frozen=True)
class Entry:
    """A BlockNorm in front of a site: nothing else reads it, and it is not the norm behind another site."""

    module: str  # fully qualified name
    block: int  # how many of the site's features it normalizes together, at most


@dataclass(frozen=True)
class Consumer:
    """A call that reads a block's output, and what it passes ``through`` on the way: changes of shape or dtype, dropout."""

    kind: Kind
    name: str  # of the module or function
    through: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " → ".join((*self.through, UNKNOWN_READER if self.kind is Kind.UNKNOWN else self.name))


@dataclass(frozen=True)
class Block:
    """A site with the norm and activation behind it, each the only reader of what is in front of it, so that one kernel may run
    all three, as far as they are modules."""

    site: str
    in_features: int
    out_features: int
    norm: Follower | None
    activation: Follower | None
    consumers: tuple[Consumer, ...]  # of what leaves the block; empty where nobody reads it or nobody knows
    is_head: bool | None  # a prediction head; None where it is not known who reads the output
    calls: int | None  # in one forward pass; None where that is not known
    entry: Entry | None = None
    is_first: bool | None = None  # reads the model's inputs alone, nothing learned and no norm between; None where not known
    aliases: tuple[str, ...] = ()  # further names of the same module
    same_weight: tuple[str, ...] = ()  # other sites that hold the same weight
    read_by: str | None = None  # a function that reads its parameters without calling it
    shared: str | None = None  # a norm or an activation behind it that runs elsewhere too, and so is not of the block

    @property
    def norm_module(self) -> str | None:
        """The norm that one kernel may run too; None for a function, which stays where it is."""
        return self.norm.module if self.norm else None

    @property
    def activation_module(self) -> str | None:
        """The activation, likewise; None also behind a norm that stays."""
        return self.activation.module if self.activation and (self.norm is None or self.norm.module) else None

    @property
    def feeds_product(self) -> bool:
        """Whether a product that is a function reads what the site itself gives."""
        is_alone = self.norm is None and self.activation is None
        return is_alone and any(consumer.kind is Kind.OTHER and consumer.name in _PRODUCTS for consumer in self.consumers)

    @property
    def is_whole(self) -> bool:
        """Whether one kernel may run all of it, so that nothing stays behind."""
        return all(follower.module is not None for follower in (self.norm, self.activation) if follower)

    @property
    def notes(self) -> tuple[str, ...]:
        """What sets the site apart from one that is called once with a weight of its own."""
        notes = []
        if self.is_head:
            notes.append("head")
        if self.calls == 0:
            notes.append(NEVER_CALLED)
        if self.calls is not None and self.calls > 1:
            notes.append(f"called {self.calls} times")
        if self.aliases:
            notes.append(f"also known as {', '.join(self.aliases)}")
        if self.same_weight:
            notes.append(f"shares its weight with {', '.join(self.same_weight)}")
        if self.read_by:
            notes.append(f"its parameters are read by {self.read_by}")
        if self.shared:
            notes.append(f"{self.shared} behind it runs elsewhere too, so that no block can absorb it")
        return tuple(notes)


@dataclass(frozen=True)
class Uncovered:
    """A product, norm or activation that is a function call, or inside a module of torch's: nothing that LoKA could swap."""

    function: str
    inside: str  # the module whose forward calls it, or that it is itself; "" is the model

    def __str__(self) -> str:
        return f"{self.function} in {self.inside or 'the model'}"


@dataclass(frozen=True)
class FoundBlocks:
    """The blocks of a model in the order of its modules, how they were found, and what is out of reach."""

    blocks: tuple[Block, ...]
    graph: Graph
    uncovered: tuple[Uncovered, ...]

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    @cached_property
    def _by_name(self) -> dict[str, Block]:
        return {name: block for block in self.blocks for name in (block.site, *block.aliases)}

    def of(self, site: str) -> Block:
        """The block of a site, by any of its names."""
        if site not in self._by_name:
            raise UnknownName(f"the model has no site {site!r}. It has: {', '.join(block.site for block in self.blocks)}")
        return self._by_name[site]

    @property
    def how(self) -> str:
        """One sentence on where the knowledge comes from."""
        if self.graph.method is Method.RUN:
            return "data flow recorded from one run on the example"
        if self.graph.method is Method.TRACE:
            return "data flow traced without an example"
        modules: dict[str, list[str]] = {}
        for name, why in self.graph.untraceable.items():
            modules.setdefault(why, []).append(name or "the model's own forward")
        reasons = "; ".join(f"{', '.join(names)}: {why}" for why, names in modules.items())
        return f"data flow traced in parts, for not all of it can be traced without an example ({reasons})"

    def __str__(self) -> str:
        lines = [self.how]
        for block in self.blocks:
            followers = [follower.kind for follower in (block.norm, block.activation) if follower]
            chain = " → ".join([f"{block.site} {block.in_features}×{block.out_features}", *followers])
            readers = ", ".join(map(str, block.consumers)) or UNKNOWN_READER
            lines.append(f"  {chain} ⇒ {readers}" + (f"   ({'; '.join(block.notes)})" if block.notes else ""))
        lines += [f"  not covered: {uncovered}" for uncovered in self.uncovered]
        return "\n".join(lines)


def find_blocks(model: nn.Module, example: Example | Arguments | None = None) -> FoundBlocks:
    """Find the blocks of ``model``.

    With ``example``, the arguments of one forward call, the model is run once and everything is known. Without, or with
    scripted parts in it, whose calls a run does not see, it is traced symbolically: in parts where its forward branches on
    values, and at the edges of those consumers are not known. The model is left as it was.
    """
    model = unwrapped(model)
    is_scripted = any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())
    graph = trace(model) if example is None or is_scripted else record_run(model, arguments_of(example))
    names = _all_names(model)
    sites = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    holders: dict[int, list[str]] = {}
    for name, module in sites.items():
        holders.setdefault(_id_of_weight(module), []).append(name)
    blocks = []
    for name, module in sites.items():
        calls = graph.calls_of(name)
        norm, ends = _step_over(graph, model, calls, Kind.NORM)
        activation, ends = _step_over(graph, model, ends, Kind.ACTIVATION)
        blocks.append(
            Block(
                site=name,
                in_features=module.in_features,
                out_features=module.out_features,
                norm=norm,
                activation=activation,
                consumers=tuple(dict.fromkeys(consumer for end in ends for consumer in _consumers(graph, end))),
                is_head=_is_head(graph, model, module, calls),
                calls=len(calls) if graph.is_known(name) else None,
                entry=_entry(graph, model, calls, module.in_features),
                is_first=any_of([_reads_inputs_alone(graph, model, call) for call in calls]),
                aliases=tuple(other for other in names[id(module)] if other != name),
                same_weight=tuple(other for other in holders[_id_of_weight(module)] if other != name),
                read_by=next((graph.parameters_read[p] for p in _parameters(name) if p in graph.parameters_read), None),
            )
        )
    return FoundBlocks(tuple(blocks), graph, _uncovered(model, graph))


def _step_over(graph: Graph, model: nn.Module, ends: list[int], kind: Kind) -> tuple[Follower | None, list[int]]:
    """What follows all calls of a site, if it is of ``kind``, the same everywhere and the only reader; and its own calls."""
    readers = [graph.readers[end] for end in ends]
    if not all(len(reader) == 1 and graph.calls[reader[0]].kind is kind for reader in readers):
        return None, ends
    nexts = [reader[0] for reader in readers]
    followers = {_follower(model, graph.calls[call]) for call in nexts}
    return (followers.pop(), nexts) if len(followers) == 1 else (None, ends)


def _entry(graph: Graph, model: nn.Module, calls: list[int], in_features: int) -> Entry | None:
    norms = {_norm_in_front(graph, model, call) for call in calls}
    name = norms.pop() if len(norms) == 1 else None
    if name is None or len(graph.calls_of(name)) != len(calls):  # it runs elsewhere too
        return None
    norm = model.get_submodule(name)
    over = norm.over(in_features) if type(norm) is BlockNorm else None  # a subclass may compute something else
    return None if over is None else Entry(name, over.block)


def _norm_in_front(graph: Graph, model: nn.Module, call: int) -> str | None:
    """The norm whose output ``call`` reads, perhaps in another shape, if nothing else does and it is not behind a site.

    Nothing may run between them: it could write to what the norm has read, and a block would read that later.
    """
    while True:
        if graph.calls[call].reads != (call - 1,) or len(graph.readers[call - 1]) != 1:
            return None
        call -= 1
        front = graph.calls[call]
        if front.kind is Kind.NORM and front.is_module:
            return None if any(graph.calls[read].kind is Kind.SITE for read in front.reads) else front.name
        if not changes_shape_alone(front, model):
            return None


def _follower(model: nn.Module, call: Call) -> Follower:
    if not call.is_module:
        return Follower(call.name, None)
    module = model.get_submodule(call.name)
    if isinstance(module, BlockNorm):
        return Follower(type(module).__name__, call.name, module.block, module.eps)
    return Follower(type(module).__name__, call.name)


def _consumers(graph: Graph, call: int, through: tuple[str, ...] = ()) -> Iterator[Consumer]:
    for reader in graph.readers[call]:
        read = graph.calls[reader]
        if read.kind is Kind.PASS:
            yield from _consumers(graph, reader, (*through, read.name))
        else:
            yield Consumer(read.kind, read.name, through)


def _is_head(graph: Graph, model: nn.Module, site: nn.Linear, calls: list[int]) -> bool | None:
    """One output, or outputs that leave the model without passing another layer that learns, a norm or an activation."""
    if site.out_features == 1:
        return True
    return any_of([_is_handed_out(graph, model, call) or _leaves_the_model(graph, model, call) for call in calls])


def any_of(answers: Sequence[bool | None]) -> bool | None:
    """Whether one is True; None where none is, but one is not known, or there are none at all."""
    if True in answers:
        return True
    return None if None in answers or not answers else False


def _reads_inputs_alone(graph: Graph, model: nn.Module, start: int) -> bool | None:
    """Whether ``start`` reads the model's inputs with nothing learned and no norm between; None where a part of the model that
    could not be traced may stand between."""
    pending, is_lost = list(graph.calls[start].reads), False
    seen = set(pending)
    while pending:
        call = graph.calls[pending.pop()]
        is_untraced = call.is_module and call.name in graph.untraceable  # it may hand an input on beside what it learns
        if not is_untraced and _learns_or_normalizes(model, call):
            return False
        is_lost |= is_untraced or (call.kind is Kind.INPUT and call.inside != "")
        pending += [read for read in call.reads if read not in seen]
        seen.update(call.reads)
    return None if is_lost else bool(seen)  # what reads nothing reads parameters alone


def _is_handed_out(graph: Graph, model: nn.Module, start: int) -> bool:
    """Whether the output of ``start`` is an output of the model, joined with nothing on the way: a prediction, whoever else
    reads it."""
    seen, pending = {start}, [start]
    while pending:
        for reader in graph.readers[pending.pop()]:
            call = graph.calls[reader]
            if call.kind is Kind.OUTPUT:
                return True
            if len(call.reads) == 1 and reader not in seen and _hands_on(model, call):
                seen.add(reader)
                pending.append(reader)
    return False


def _hands_on(model: nn.Module, call: Call) -> bool:
    """Whether a prediction is one still behind ``call``, which reads nothing else. A mean or a comparison of it is none."""
    is_output_activation = call.kind is Kind.ACTIVATION and not _stops(model, call)
    return call.kind is Kind.PASS or is_output_activation or (not call.is_module and call.name in _SCALINGS)


def _leaves_the_model(graph: Graph, model: nn.Module, start: int) -> bool | None:
    """Whether the output of ``start`` reaches the model's output unchanged by anything learned; None where it is lost sight of.

    A value that goes on into another layer as well is no prediction, if only a residual carries it to the output.
    """
    seen, pending = {start}, [start]
    reached = lost = False
    while pending:
        readers = list(graph.readers[pending.pop()])
        while readers:
            reader = readers.pop()
            call = graph.calls[reader]
            if call.kind is Kind.OUTPUT:
                reached = True
            elif call.kind is Kind.UNKNOWN:  # goes on wherever the untraceable module is called
                callers = graph.calls_of(call.name)
                lost |= not callers
                pending += [caller for caller in callers if caller not in seen]
                seen.update(callers)
            elif _stops(model, call):
                return False
            elif reader not in seen:
                seen.add(reader)
                pending.append(reader)
    return None if lost or not reached else True


def _stops(model: nn.Module, call: Call) -> bool:
    """Whether what comes out of ``call`` is a new representation, rather than a prediction on its way out."""
    if call.kind is Kind.ACTIVATION:
        kind = type(model.get_submodule(call.name)).__name__ if call.is_module else call.name
        return kind not in _OUTPUT_ACTIVATIONS
    return _learns_or_normalizes(model, call)


def _learns_or_normalizes(model: nn.Module, call: Call) -> bool:
    if call.kind in (Kind.SITE, Kind.NORM):
        return True
    if call.is_module:
        return any(True for _ in model.get_submodule(call.name).parameters())
    return call.name in _LEARNED_FUNCTIONS


def _uncovered(model: nn.Module, graph: Graph) -> tuple[Uncovered, ...]:
    """Norms and activations that are no modules, and products that are no linear layers."""
    found: dict[Uncovered, None] = {}
    for call in graph.calls:
        if call.is_module:
            module = model.get_submodule(call.name)
            if isinstance(module, _PRODUCT_MODULES):
                found[Uncovered(type(module).__name__, call.name)] = None
        elif call.kind in (Kind.NORM, Kind.ACTIVATION) or call.name in _PRODUCTS:
            found[Uncovered(call.name, call.inside)] = None
    return tuple(found)


def _all_names(model: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    return names


def _id_of_weight(site: nn.Linear) -> int:
    """A parametrized weight is made anew at each access, by its layer alone: then the id is the layer's."""
    return id(site._parameters.get("weight", site))


def _parameters(site: str) -> tuple[str, str]:
    prefix = f"{site}." if site else ""
    return f"{prefix}weight", f"{prefix}bias"
