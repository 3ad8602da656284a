"""Found blocks as text, to compare with what was planted."""

from loka.nn.blocks import FoundBlocks


def lines(found: FoundBlocks) -> list[str]:
    """Each block in a line, without shapes."""
    return [
        " → ".join([block.site, *(f.kind for f in (block.norm, block.activation) if f)])
        + " ⇒ "
        + ", ".join(map(str, block.consumers))
        for block in found
    ]
