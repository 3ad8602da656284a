import pytest

from loka.core.errors import InvalidInput, UnknownName
from loka.data.batch import FeatureSchema
from loka.models.registry import MODELS, PRESETS, build_model


def test_every_model_comes_in_every_size() -> None:
    assert MODELS.names() == ["dcnv2", "dlrm", "interformer", "wukong"]
    for _, family in MODELS.items():
        assert tuple(family.presets) == PRESETS


def test_unknown_model_lists_the_known(schema: FeatureSchema) -> None:
    with pytest.raises(UnknownName, match=r"Did you mean 'wukong'\? Known: dcnv2, dlrm, interformer, wukong"):
        build_model("wukon", "tiny", schema)


def test_unknown_preset_lists_the_known(schema: FeatureSchema) -> None:
    with pytest.raises(UnknownName, match=r"dlrm has no preset 'huge'\. Known: tiny, small, base, large"):
        build_model("dlrm", "huge", schema)


def test_unknown_option_lists_the_known(schema: FeatureSchema) -> None:
    with pytest.raises(InvalidInput, match=r"dcnv2 has no option width\. It has: dim, n_layers, rank, top_widths, dropout"):
        build_model("dcnv2", "tiny", schema, width=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 0}, "interformer: dim must be a whole number of at least 1, got 0"),
        ({"n_layers": 1.5}, "n_layers must be a whole number"),
        ({"n_heads": True}, "n_heads must be a whole number"),
        ({"top_widths": ()}, "top_widths must be one width or more"),
        ({"top_widths": (64, 0)}, "top_widths must be one width or more"),
        ({"dropout": 1.0}, "dropout must be a probability"),
        ({"dim": 10, "n_heads": 2}, "dim=10 must be a multiple of 2·n_heads=4"),
    ],
)
def test_option_without_sense_is_refused(schema: FeatureSchema, options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        build_model("interformer", "tiny", schema, **options)


def test_overrides_replace_the_preset(schema: FeatureSchema) -> None:
    model = build_model("wukong", "tiny", schema, n_layers=3, top_widths=(24, 20))
    assert len(model.dense_part.layers) == 3
    assert model.dense_part.head.in_features == 20
