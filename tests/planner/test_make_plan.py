"""The plan as a whole: limits, what is kept, and how a refusal of the input reads."""

import json
import math
from pathlib import Path

import msgspec
import pytest
import torch
from planned_survey import BASELINE, ENVIRONMENT, baseline, candidate, error, site, survey

import loka
from loka.core.errors import InvalidFile, InvalidInput
from loka.core.estimate import Estimate
from loka.core.gemm import Role
from loka.core.plan import Goal, Plan, digest_of_plan
from loka.core.recipe import Transform
from loka.core.survey import BlockCandidate, Survey

M = 100


def fast(name: str, **fields: object):  # type: ignore[no-untyped-def]
    own = candidate("a.one", Role.FPROP, {M: 10.0}, forms=("fp32", "fp32"))
    return site(name, (*baseline({role: {M: 100.0} for role in Role}), own), **fields)


def test_heads_and_what_is_kept_stay_in_high_precision() -> None:
    sites = [fast("towers.0.in"), fast("towers.1.in"), fast("mlp.0"), fast("out", is_head=True)]
    plan = loka.make_plan(survey(*sites), keep=["towers.1", "mlp.*"])
    assert {s.site: s.is_low_precision for s in plan.sites} == {
        "towers.0.in": True, "towers.1.in": False, "mlp.0": False, "out": False,
    }  # fmt: skip
    reasons = {s.site: s.reason for s in plan.sites}
    assert reasons["towers.1.in"] == "kept in high precision by keep='towers.1'"
    assert reasons["out"] == "a prediction head, and heads stay in high precision"
    assert all(choice.kernel == BASELINE for choice in plan.sites[3].kernels.values())
    assert plan.document.keep == ("towers.1", "mlp.*")
    assert {r.reason for r in plan.sites[3].refused} == {reasons["out"]}


def test_a_name_with_brackets_is_a_name() -> None:
    plan = loka.make_plan(survey(fast("e[0].in"), fast("e0.in")), keep=["e[0]"])
    assert {s.site: s.is_low_precision for s in plan.sites} == {"e[0].in": False, "e0.in": True}


def test_what_nothing_can_stand_in_for_stays_with_its_reason() -> None:
    plan = loka.make_plan(survey(fast("a"), fast("b", stays="is a Scaled, and only torch.nn.Linear is swapped")))
    assert [(one.site, one.is_low_precision) for one in plan.sites] == [("a", True), ("b", False)]
    assert plan.sites[1].reason == "is a Scaled, and only torch.nn.Linear is swapped"


def test_a_plan_carries_where_it_comes_from_and_survives_its_file(tmp_path: Path) -> None:
    plan = loka.make_plan(
        survey(fast("a"), fast("b", is_head=True)), goal="serving", max_error={Role.FPROP: 0.3}, min_speedup=1.2
    )
    document = plan.document
    assert (document.fingerprint, document.environment, document.goal) == ("0123456789abcdef", ENVIRONMENT, Goal.SERVING)
    assert document.max_error == {Role.FPROP: 0.3, Role.DGRAD: 0.2, Role.WGRAD: 0.2}
    plan.save(tmp_path)
    assert Plan.load(tmp_path) == plan
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_plan_is_printed_a_site_a_line() -> None:
    made_from = survey(fast("a"), fast("b", is_head=True))
    plan = loka.make_plan(made_from, goal="serving")
    assert str(plan).splitlines() == [
        f"serving on {ENVIRONMENT.device}: 1 of 2 sites in low precision, 1.82× over all sites",
        f"a 64×32: a.one: {plan.sites[0].reason}",
        f"b 64×32: {BASELINE}: a prediction head, and heads stay in high precision",
    ]
    assert repr(plan) == f"<Plan for serving on {ENVIRONMENT.device}: 1 of 2 sites in low precision, 1.82× over all sites>"
    assert repr(made_from) == f"<Survey on {ENVIRONMENT.device}: 8 candidates at 2 sites>"
    (behind,) = plan.sites[:1]
    assert str(msgspec.structs.replace(behind, transform=Transform.CENTER)).startswith("a 64×32: a.one behind center: ")
    training = loka.make_plan(survey(fast("a")))
    assert f"fprop a.one, dgrad {BASELINE}, wgrad {BASELINE}" in str(training)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"goal": "train"}, "goal must be one of training, serving, got 'train'"),
        ({"max_error": 0.0}, "max_error of fprop must be a number above 0, such as 0.2, got 0.0"),
        ({"max_error": math.nan}, "max_error of fprop must be a number above 0"),
        ({"max_error": {Role.DGRAD: -1.0}}, "max_error of dgrad must be a number above 0, such as 0.2, got -1.0"),
        ({"max_error": {"forward": 0.1}}, "max_error names the role 'forward': the roles are fprop, dgrad, wgrad"),
        ({"min_speedup": -1.0}, "min_speedup must be a number, 0 or above, such as 1.05, got -1.0"),
        ({"min_speedup": math.inf}, "min_speedup must be a number, 0 or above"),
        ({"keep": ["tower.0"]}, r"keep='tower.0' matches no site. Did you mean 'towers.0'\?"),
        ({"keep": ["zzz"]}, "keep='zzz' matches no site. The sites are: towers.0"),
    ],
)
def test_bad_limits_say_what_may_be_given(limits: dict, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        loka.make_plan(survey(fast("towers.0")), **limits)


def test_an_empty_survey_has_nothing_to_plan() -> None:
    with pytest.raises(InvalidInput, match="no site to plan for: probe a model with linear layers"):
        loka.make_plan(survey())


def test_a_site_whose_baseline_was_not_timed_stays() -> None:
    own = candidate("a.one", Role.FPROP, {M: 10.0}, forms=("fp32", "fp32"))
    one = loka.make_plan(survey(site("a", (own,)))).sites[0]
    assert one.reason == "its baseline torch.fp32 was not timed, so there is nothing to compare with"
    assert [r.reason for r in one.refused] == [one.reason]
    failed = candidate("torch.fp32", Role.FPROP, {}, why_not="returned NaN or inf")
    one = loka.make_plan(survey(site("a", (own, failed)))).sites[0]
    assert one.reason == "its baseline torch.fp32 was not timed (returned NaN or inf), so there is nothing to compare with"


def test_a_site_that_was_never_called_says_so() -> None:
    one = loka.make_plan(survey(site("a", (), calls={}, notes=("head", "never called while the Probe looked")))).sites[0]
    assert one.reason == "never called while the Probe looked"


def test_a_transform_without_its_vector_is_refused() -> None:
    own = candidate("a.one", Role.FPROP, {M: 10.0}, forms=("fp32", "fp32"), transform=Transform.CENTER)
    with pytest.raises(InvalidInput, match="the survey lacks the vector a/center: measure the record again"):
        loka.make_plan(survey(site("a", (*baseline({Role.FPROP: {M: 100.0}}), own))))


def test_a_plan_that_cannot_be_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of its files, for each is nothing without the other."""
    transformed = candidate("a.one", Role.FPROP, {M: 10.0}, forms=("fp32", "fp32"), transform=Transform.CENTER)
    centered = site("a", (*baseline({role: {M: 100.0} for role in Role}), transformed))
    before = loka.make_plan(survey(centered, vectors={"a/center": torch.ones(64)}))
    assert before.vectors
    before.save(tmp_path)

    def full(*args: object) -> None:
        raise OSError("No space left on device")

    for other in (loka.make_plan(survey(fast("a"))), before):
        with monkeypatch.context() as patched:
            patched.setattr("loka.core.plan.write_document", full)
            with pytest.raises(OSError, match="No space"):
                other.save(tmp_path)
        assert Plan.load(tmp_path).vectors.keys() == before.vectors.keys()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "plan.safetensors"]
    loka.make_plan(survey(fast("a"))).save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_an_error_that_is_no_number_does_not_qualify() -> None:
    nan = {"mere_floored": Estimate(math.nan, math.nan, math.nan, 50)}
    own = candidate("a.one", Role.FPROP, {M: 10.0}, forms=("fp32", "fp32"), error=nan)
    one = loka.make_plan(survey(site("a", (*baseline({role: {M: 100.0} for role in Role}), own)))).sites[0]
    assert not one.is_low_precision


def test_one_name_may_be_kept_without_a_list() -> None:
    made = [loka.make_plan(survey(fast("towers"), fast("t")), keep=keep) for keep in ("towers", ["towers"])]
    assert made[0] == made[1]
    assert [one.is_low_precision for one in made[0].sites] == [False, True]


@pytest.mark.parametrize(("of_site", "of_dgrad"), [(Transform.RESCALE, Transform.NONE), (Transform.CENTER, Transform.RESCALE)])
def test_no_role_joins_a_site_by_another_transform(of_site: Transform, of_dgrad: Transform) -> None:
    """Rescaled weights are what dgrad reads too; of a centered x it reads nothing, but nothing is rescaled there either."""
    exact = {"forms": ("fp32", "fp32")}
    forward = [candidate("a.one", role, {M: 10.0}, transform=of_site, **exact) for role in (Role.FPROP, Role.WGRAD)]
    dgrad = candidate("a.one", Role.DGRAD, {M: 70.0}, transform=of_dgrad, **exact)
    candidates = (*baseline({role: {M: 100.0} for role in Role}), *forward, dgrad)
    vectors = {f"a/{transform}": torch.ones(64) for transform in (Transform.RESCALE, Transform.CENTER)}
    one = loka.make_plan(survey(site("a", candidates), vectors=vectors)).sites[0]
    assert (one.transform, one.kernels[Role.FPROP].kernel) == (of_site, "a.one")
    assert one.kernels[Role.DGRAD].kernel == BASELINE


def test_serving_speaks_of_fprop_alone() -> None:
    every = [candidate("a.one", role, {M: 200.0}, forms=("fp32", "fp32")) for role in Role]
    one = loka.make_plan(survey(site("a", (*baseline({role: {M: 100.0} for role in Role}), *every))), goal="serving").sites[0]
    assert {refusal.role for refusal in one.refused} == {Role.FPROP}


def test_a_kernel_may_be_chosen_that_does_not_take_the_most_frequent_rows() -> None:
    """Those then run in high precision; its own time at them is none."""
    own = candidate("a.one", Role.FPROP, {1000: 10.0}, forms=("fp32", "fp32"))
    times = {role: {64: 1.0, 1000: 1000.0} for role in Role}
    one = loka.make_plan(survey(site("a", (*baseline(times), own), calls={64: 5.0, 1000: 1.0})), goal="serving").sites[0]
    assert one.kernels[Role.FPROP].kernel == "a.one"
    assert (one.baseline_us, one.time_us) == (1005.0, 15.0)


def test_vectors_go_with_the_sites_that_are_given_back() -> None:
    centered = candidate("a.one", Role.FPROP, {M: 10.0}, forms=("fp32", "fp32"), transform=Transform.CENTER)
    candidates = (*baseline({role: {M: 100.0} for role in Role}), centered)
    plan = loka.make_plan(survey(site("a", candidates), vectors={"a/center": torch.ones(64)}))
    assert set(plan.vectors) == {"a/center"}
    assert plan.giving_back({"a": "costs too much"}).vectors == {}


def test_a_plan_with_other_vectors_has_another_digest(tmp_path: Path) -> None:
    centered = candidate("a.one", Role.FPROP, {M: 10.0}, forms=("fp32", "fp32"), transform=Transform.CENTER)
    candidates = (*baseline({role: {M: 100.0} for role in Role}), centered)
    digests = set()
    for value in (1.0, 2.0):
        loka.make_plan(survey(site("a", candidates), vectors={"a/center": torch.full((64,), value)})).save(tmp_path)
        digests.add(digest_of_plan(tmp_path))
    assert len(digests) == 2


def test_a_survey_has_the_digest_that_it_has_once_it_is_read_again(tmp_path: Path) -> None:
    """By which a plan that was made of either names it: a file has 1.0 where the survey in memory may have 1."""
    whole = survey(fast("a", calls={M: 3}))
    whole.save(tmp_path)
    assert Survey.load(tmp_path).document.digest == whole.document.digest
    assert survey(fast("a", calls={M: 4})).document.digest != whole.document.digest


def test_a_file_must_say_the_limit_of_every_role(tmp_path: Path) -> None:
    path = loka.make_plan(survey(fast("a"))).save(tmp_path)
    fields = json.loads(path.read_text())
    del fields["max_error"]["wgrad"]
    path.write_text(json.dumps(fields))
    with pytest.raises(InvalidFile, match="its max_error of wgrad is no number above 0"):
        Plan.load(tmp_path)


def test_what_serving_alone_passes_by_is_planned_for_training() -> None:
    passed = survey(fast("a", stays_serving="passed by when it serves"))
    training, serving = (loka.make_plan(passed, goal=goal).sites[0] for goal in (Goal.TRAINING, Goal.SERVING))
    assert (training.is_low_precision, serving.is_low_precision) == (True, False)
    assert serving.reason == "passed by when it serves"


def test_what_reads_a_sites_parameters_is_in_its_plan_whatever_is_given_back() -> None:
    sites = (fast("a", read_by="t"), fast("b", is_head=True, read_by="add"), fast("c"))
    plan = loka.make_plan(survey(*sites), goal="serving")
    for one in (plan, plan.giving_back({"a": "too costly"}), plan.giving_back_forward({"a": "too costly"})):
        assert [site.read_by for site in one.sites] == ["t", "add", None]


def test_at_a_site_that_stays_a_kernel_that_cannot_run_says_its_own_reason() -> None:
    able, unable = candidate("a.one", Role.FPROP, {M: 10.0}), candidate("b.one", Role.FPROP, {}, why_not="needs a GPU")
    head = site("a", (*baseline({Role.FPROP: {M: 100.0}}), able, unable), is_head=True)
    (planned,) = loka.make_plan(survey(head)).sites
    assert {refusal.kernel: refusal.reason for refusal in planned.refused} == {
        "a.one": "a prediction head, and heads stay in high precision",
        "b.one": "needs a GPU",
    }


class TestKernelsToPlanFrom:
    able = tuple(
        candidate(name, Role.FPROP, {M: us}, forms=("fp32", "fp32")) for name, us in (("a.one", 10.0), ("b.two", 20.0))
    )
    two = survey(site("a", (*baseline({Role.FPROP: {M: 100.0}}), *able)))

    @pytest.mark.parametrize("kernels", [["b.two"], ["b.*"], "b.two"])
    def test_no_others_are_chosen(self, kernels: list[str] | str) -> None:
        assert loka.make_plan(self.two, goal="serving").sites[0].kernels[Role.FPROP].kernel == "a.one"
        plan = loka.make_plan(self.two, goal="serving", kernels=kernels)
        (planned,) = plan.sites
        assert planned.kernels[Role.FPROP].kernel == "b.two"
        assert {refusal.kernel: refusal.reason for refusal in planned.refused} == {
            "a.one": "not among the kernels to plan from"
        }
        assert plan.document.kernels == ((kernels,) if isinstance(kernels, str) else tuple(kernels))
        assert plan.document.survey == self.two.document.digest

    def test_where_none_is_able_the_site_stays(self) -> None:
        (planned,) = loka.make_plan(self.two, goal="serving", kernels=[BASELINE]).sites
        assert not planned.is_low_precision

    def test_what_a_survey_without_gradients_gives_a_training_plan_is_told(self, caplog: pytest.LogCaptureFixture) -> None:
        fprop_alone = survey(site("a", baseline({Role.FPROP: {100: 100.0}})))
        loka.make_plan(fprop_alone, goal="serving")
        assert not caplog.messages
        loka.make_plan(fprop_alone)
        assert "probed without gradients, so only forward passes are planned" in caplog.text

    @pytest.mark.parametrize(
        ("limits", "message"),
        [
            ({"max_error": True}, "max_error of fprop must be a number above 0"),
            ({"min_speedup": True}, "min_speedup must be a number, 0 or above"),
            ({"keep": 3}, "keep takes names of sites, or patterns, in a list; got 3"),
            ({"keep": ["a", 3]}, r"keep takes names of sites, or patterns, in a list; got 'a', 3"),
            ({"kernels": [3]}, r"kernels takes names of kernels, or patterns, in a list; got 3"),
        ],
    )
    def test_what_is_no_limit_is_refused(self, limits: dict, message: str) -> None:
        with pytest.raises(InvalidInput, match=message):
            loka.make_plan(self.two, **limits)

    def test_none_at_all_are_refused(self) -> None:
        with pytest.raises(InvalidInput, match="kernels names none to plan from: name some, or leave it out for all"):
            loka.make_plan(self.two, kernels=[])

    def test_blocks_are_kernels_too(self) -> None:
        errors = {role: error(0.1) for role in Role}
        times = {"forward_us": {M: 1.0}, "baseline_forward_us": {M: 200.0}, "input_cast_us": {M: 0.0}}
        block = BlockCandidate("triton.block", "norm", "act", error=errors, **times)  # type: ignore[arg-type]
        both = survey(msgspec.structs.replace(self.two.sites[0], blocks=(block,)))
        assert loka.make_plan(both, goal="serving").sites[0].block is not None
        assert loka.make_plan(both, goal="serving", kernels=["a.one"]).sites[0].block is None
        assert loka.make_plan(self.two, goal="serving", kernels=["a.one", "triton.block"]).sites[0].block is None  # it has none
        assert loka.make_plan(both, goal="serving", kernels=None).sites[0].block is not None

    def test_one_that_was_not_measured_is_told(self) -> None:
        with pytest.raises(InvalidInput, match=r"kernels='b.tow' matches no kernel of this survey. Did you mean 'b.two'"):
            loka.make_plan(self.two, kernels=["b.tow"])
