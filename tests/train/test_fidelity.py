"""Predicted errors beside true ones: where rows are what a predictor takes them for, it is right; where not, it is not."""

import torch
from torch import Tensor, nn

from loka.train.fidelity import PREDICTORS, fp8_options, study, study_planted


def labels_times_a_direction(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """x is normal about 5, dy one direction with errors ±0.5: each of its columns has two values, which rowwise scales hit."""
    error_M1 = torch.where(torch.rand(128, 1, generator=generator) < 0.3, -0.5, 0.5)
    return torch.randn(128, 32, generator=generator) + 5, error_M1 * torch.linspace(1, 2, 16)


def test_predictors_are_held_to_held_out_batches() -> None:
    site = study_planted(labels_times_a_direction, torch.randn(16, 32, generator=torch.Generator().manual_seed(0)), 16)
    assert site.predicted.keys() == set(PREDICTORS)
    for option in ("fprop e4m3 rowwise", "dgrad e4m3 rowwise", "wgrad e4m3 rowwise"):
        true = [(a + b) / 2 for a, b in zip(site.halves[0][option], site.halves[1][option], strict=True)]
        for predictor in ("learned", "reservoir"):
            for predicted, metric in zip(site.predicted[predictor][option], true, strict=True):
                assert abs(predicted - metric) < 0.25 * metric, (predictor, option)
    exact, normal = (site.predicted[name]["wgrad e4m3 rowwise"][1] for name in ("learned", "randn"))
    assert normal > 2 * exact  # what benchmarks on randn would say


def pairs_that_cancel(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Of two rows next to each other x is nearly the same and dy the opposite."""
    x_HK, dy_HN = torch.randn(64, 32, generator=generator), torch.randn(64, 16, generator=generator)
    return torch.cat([x_HK, x_HK + 0.1 * torch.randn(64, 32, generator=generator)]), torch.cat([dy_HN, -dy_HN])


def test_how_rows_of_a_batch_cancel_is_learned_too() -> None:
    site = study_planted(pairs_that_cancel, torch.randn(16, 32, generator=torch.Generator().manual_seed(0)), 32)
    for option in ("wgrad e4m3 rowwise", "wgrad e5m2·e4m3 tensorwise"):
        for metric in range(2):
            true = (site.halves[0][option][metric] + site.halves[1][option][metric]) / 2
            assert abs(site.predicted["learned"][option][metric] - true) < 0.1 * true
            assert site.predicted["drawn"][option][metric] < true / 3


def test_heads_and_layers_without_gradients_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    batches = iter(lambda: torch.randn(32, 8), None)
    assert study(model, batches, lambda x: model(x).sum(), 8).keys() == {"0"}


def test_every_recipe_is_there_once_for_each_role() -> None:
    options = fp8_options(128, 16, 32)
    names = [f"{option.role} {option.recipe}" for option in options]
    assert len(names) == len(set(names)) == 4 + 5 + 6
    assert not any("int8" in name for name in names)
