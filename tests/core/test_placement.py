"""Placement does what each setting asks for, never breaks a budget, favours the earliest, and says why it cannot."""

import pytest
from hypothesis import given, strategies as st

from zero.core.offload import PRESETS, Offload, budget_text
from zero.core.placement import TIERS, Placement, budget_bytes, place
from zero.errors import ConfigError

GiB = 1024**3

# What is wanted


@pytest.mark.parametrize(
    ("preset", "sharded", "whole"),
    [
        ("none", ("none", "none", "none"), ("none", "none", "none")),
        ("cpu", ("cpu", "cpu", "cpu"), ("cpu", "none", "cpu")),
        ("nvme", ("nvme", "cpu", "cpu"), ("nvme", "none", "cpu")),
        ("infinity", ("nvme", "nvme", "nvme"), None),
        ("auto", ("auto", "auto", "auto"), ("auto", "none", "auto")),
    ],
)
def test_a_preset_applies_the_kinds_that_exist_at_the_stage(preset, sharded, whole):
    offload = Offload(preset, path="/mnt/nvme", threads=3)
    assert offload.at(parameters_sharded=True).kinds == sharded
    assert offload.at(parameters_sharded=True).threads == 3
    if whole is not None:
        assert offload.at(parameters_sharded=False).kinds == whole


def test_without_arguments_nothing_leaves_the_device():
    assert Offload() == Offload("none") == Offload(optimizer="none", param="none", grad="none")
    assert Offload().at(parameters_sharded=False) == Offload()


def test_a_preset_is_its_kinds_and_a_kind_wins_over_the_preset():
    assert Offload("nvme") == Offload("none", optimizer="nvme", param="cpu_if_sharded", grad="cpu")
    assert Offload("nvme", optimizer="cpu").kinds == ("cpu", "cpu_if_sharded", "cpu")
    assert Offload("infinity", param="none").at(parameters_sharded=False).kinds == ("nvme", "none", "nvme")


def test_what_is_resolved_stays_as_it_is():
    for preset in PRESETS:
        once = Offload(preset).at(parameters_sharded=True)
        assert once.at(parameters_sharded=True) == once


@pytest.mark.parametrize(
    ("offload", "said"),
    [
        (
            Offload("infinity"),
            "offload=infinity keeps parameters on disk, which only zero.stage=3 can. Use zero.stage=3, or offload=nvme",
        ),
        (
            Offload("nvme", param="cpu"),
            "offload.param=cpu keeps parameters on the host, which only zero.stage=3 can. "
            "Use zero.stage=3, or offload.param=none.",
        ),
        (Offload(param="nvme"), "offload.param=nvme keeps parameters on disk"),
    ],
    ids=str,
)
def test_parameters_asked_off_the_device_where_they_are_whole(offload, said):
    with pytest.raises(ConfigError) as caught:
        offload.at(parameters_sharded=False)
    assert str(caught.value).startswith(said)
    offload.at(parameters_sharded=True)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"preset": "nvem"}, "offload=nvem: must be one of none, cpu, nvme, infinity, auto"),
        (
            {"preset": {"optimizer": "cpu"}},
            "offload={'optimizer': 'cpu'}: must be one of none, cpu, nvme, infinity, auto, or zero.Offload(optimizer=",
        ),
        ({"optimizer": "disk"}, "offload.optimizer=disk: must be one of none, cpu, nvme, auto"),
        ({"optimizer": "cpu_if_sharded"}, "offload.optimizer=cpu_if_sharded: must be one of"),
        ({"grad": "infinity"}, "offload.grad=infinity: must be one of none, cpu, nvme, auto"),
        ({"path": 3}, "offload.path=3: must be text"),
        ({"page_bytes": 6000}, "offload.page=6000: must be a positive multiple of 4KiB"),
        ({"page_bytes": 0}, "offload.page=0: must be a positive multiple of 4KiB"),
        ({"threads": 0}, "offload.threads=0: must be a whole number from 1"),
        ({"threads": True}, "offload.threads=true: must be a whole number from 1"),
        ({"ahead": -1}, "offload.ahead=-1: must be a size such as 8GiB, or auto"),
        ({"device_budget": -1}, "offload.device_budget=-1: must be a size such as 8GiB, a share"),
        ({"host_budget": 1.5}, "offload.host_budget=1.5: must be a size such as 8GiB, a share"),
        ({"compute": "gpu"}, "offload.compute=gpu: must be device, host, a share such as 0.4, or auto"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_one_line(settings, said):
    with pytest.raises(ConfigError) as caught:
        Offload(**settings)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_a_budget_is_bytes_or_a_share_and_never_more_than_is_free():
    assert budget_bytes(None, 1000) == 1000
    assert budget_bytes(300, 1000) == 300
    assert budget_bytes(3000, 1000) == 1000
    assert budget_bytes(0.25, 1000) == 250
    assert [budget_text(budget) for budget in (2 * GiB, 0.5, 0.125, 1.0)] == ["2.0 GiB", "50%", "12.5%", "100%"]


# Where it goes

SIZES = st.integers(0, 40)
SETTINGS = st.sampled_from(["none", "cpu", "nvme", "auto"])
CASES = st.fixed_dictionaries(
    {
        "kinds": st.tuples(SETTINGS, SETTINGS, SETTINGS),
        "sizes": st.lists(SIZES, max_size=8),
        "param_bytes": SIZES,
        "grad_bytes": SIZES,
        "device_fixed_bytes": SIZES,
        "host_fixed_bytes": SIZES,
        "device_bytes": st.integers(0, 200),
        "host_bytes": st.integers(0, 200),
        "device_is_host": st.booleans(),
    }
)


def placed(case) -> Placement | None:
    """None where it was refused."""
    case = dict(case)
    optimizer, param, grad = case.pop("kinds")
    groups = [(number // 3, number % 3, size) for number, size in enumerate(case.pop("sizes"))]
    try:
        return place(Offload(optimizer=optimizer, param=param, grad=grad), groups, **case)
    except ConfigError:
        return None


def speeds(placement: Placement) -> list[int]:
    """Of parameters, gradients, then each group: 0 is fastest."""
    return [TIERS.index(tier) for tier in (placement.param, placement.grad, *placement.optimizer.values())]


def held(case, placement: Placement) -> dict[str, int]:
    """Counted again, without the code under test."""
    total = {"device": case["device_fixed_bytes"], "host": case["host_fixed_bytes"], "nvme": 0}
    total[placement.param] += case["param_bytes"]
    total[placement.grad] += case["grad_bytes"]
    for tier, size in zip(placement.optimizer.values(), case["sizes"], strict=True):
        total[tier] += size
    return total


@given(CASES)
def test_never_over_a_budget_and_the_totals_are_right(case):
    placement = placed(case)
    if placement is None:
        return
    total = held(case, placement)
    assert placement.bytes == total
    if case["device_is_host"]:
        assert total["device"] + total["host"] <= case["host_bytes"]
    else:
        assert total["device"] <= case["device_bytes"]
        assert total["host"] <= case["host_bytes"]


@given(CASES)
def test_a_tier_that_was_named_is_kept(case):
    placement = placed(case)
    if placement is None:
        return
    names = {"none": "device", "cpu": "host", "nvme": "nvme"}
    optimizer, param, grad = case["kinds"]
    assert param == "auto" or placement.param == names[param]
    assert grad == "auto" or placement.grad == names[grad]
    assert optimizer == "auto" or set(placement.optimizer.values()) <= {names[optimizer]}


@given(CASES)
def test_refused_only_where_what_is_fixed_does_not_fit(case):
    fixed = {"device": case["device_fixed_bytes"], "host": case["host_fixed_bytes"], "nvme": 0}
    sizes = (sum(case["sizes"]), case["param_bytes"], case["grad_bytes"])
    for setting, size in zip(case["kinds"], sizes, strict=True):
        if setting != "auto":
            fixed[{"none": "device", "cpu": "host", "nvme": "nvme"}[setting]] += size
    if case["device_is_host"]:
        fits = fixed["device"] + fixed["host"] <= case["host_bytes"]
    else:
        fits = fixed["device"] <= case["device_bytes"] and fixed["host"] <= case["host_bytes"]
    assert (placed(case) is not None) == fits


@given(CASES)
def test_the_earliest_groups_get_the_fastest_tier_and_visiting_order_is_kept(case):
    placement = placed(case)
    if placement is None:
        return
    groups = speeds(placement)[2:]
    assert groups == sorted(groups)
    assert list(placement.optimizer) == [(number // 3, number % 3) for number in range(len(case["sizes"]))]


@given(CASES)
def test_no_room_is_left_for_the_first_that_went_slower(case):
    """Greedy: whoever is `auto` could not have had a faster tier at its turn."""
    placement = placed({**case, "kinds": ("auto", "auto", "auto")})
    if placement is None:
        return
    left = {"device": case["device_bytes"] - case["device_fixed_bytes"]}
    left["host"] = case["host_bytes"] - case["host_fixed_bytes"]
    if case["device_is_host"]:
        left = {"host": left["host"] - case["device_fixed_bytes"], "device": -1}
    sizes = [case["param_bytes"], case["grad_bytes"], *case["sizes"]]
    floor = 0
    for place_in_order, (size, tier) in enumerate(zip(sizes, speeds(placement), strict=True)):
        floor = floor if place_in_order > 2 else 0  # a tier that was full for a group is closed to later groups
        assert all(size > left[faster] for faster in TIERS[floor:tier])
        if TIERS[tier] != "nvme":
            left[TIERS[tier]] -= size
        floor = tier


@given(CASES, st.integers(0, 60), st.integers(0, 60))
def test_more_memory_is_never_worse(case, more_device, more_host):
    """The first whose tier changes gets a faster one; with parameters and gradients fixed, so does every group."""
    before = placed(case)
    larger = {
        "device_bytes": case["device_bytes"] + more_device,
        "host_bytes": case["host_bytes"] + more_host,
    }
    if before is None:
        return
    after = placed({**case, **larger})
    assert after is not None
    assert speeds(after) <= speeds(before)
    if "auto" not in case["kinds"][1:]:
        assert all(new <= old for new, old in zip(speeds(after), speeds(before), strict=True))


def fits(offload: Offload, **case) -> Placement:
    sizes = {
        "param_bytes": 2 * GiB,
        "grad_bytes": 4 * GiB,
        "device_fixed_bytes": GiB,
        "host_fixed_bytes": GiB,
        "device_bytes": 80 * GiB,
        "host_bytes": 100 * GiB,
        "device_is_host": False,
    }
    return place(offload, [(unit, 0, 6 * GiB) for unit in range(2)], **{**sizes, **case})


def test_on_a_cpu_there_is_one_memory():
    placement = fits(Offload("auto"), device_is_host=True, device_bytes=0, host_bytes=14 * GiB)
    assert (placement.param, placement.grad) == ("host", "host")
    assert list(placement.optimizer.values()) == ["host", "nvme"]
    assert placement.bytes == {"device": GiB, "host": 13 * GiB, "nvme": 6 * GiB}


@pytest.mark.parametrize(
    ("offload", "case", "said"),
    [
        (
            Offload("cpu", param="cpu", host_budget=2 * GiB),
            {"host_bytes": 2 * GiB},
            "offload.host_budget=2.0 GiB: a rank needs at least 19.0 GiB there: 1.0 GiB of buffers (their smallest "
            "number) + 12.0 GiB of master and moments + 2.0 GiB of parameters + 4.0 GiB of gradients. "
            "Raise offload.host_budget, or set offload.optimizer=nvme, or use more ranks.",
        ),
        (
            Offload("infinity", host_budget=0.5),
            {"host_bytes": GiB // 2},
            "offload.host_budget=50% leaves 512.0 MiB: a rank needs at least 1.0 GiB there: 1.0 GiB of buffers "
            "(their smallest number). Raise offload.host_budget, or set offload.page smaller, or use more ranks.",
        ),
        (
            Offload(),
            {"device_bytes": 16 * GiB},
            "device memory has 16.0 GiB free: a rank needs at least 19.0 GiB there: 1.0 GiB of buffers (their smallest "
            "number) + 12.0 GiB of master and moments + 2.0 GiB of parameters + 4.0 GiB of gradients. "
            "Set offload.optimizer=cpu, or use more ranks.",
        ),
        (
            Offload(grad="cpu", optimizer="nvme", host_budget=20 * GiB),
            {"host_bytes": 3 * GiB},
            "offload.host_budget=20.0 GiB leaves 3.0 GiB: a rank needs at least 5.0 GiB",
        ),
        (
            Offload(),
            {"device_is_host": True, "host_bytes": 16 * GiB},
            "host memory has 16.0 GiB free: a rank needs at least 20.0 GiB there: 2.0 GiB of buffers",
        ),
        (
            Offload("auto", device_budget=GiB),
            {"device_is_host": True},
            "offload.device_budget=1.0 GiB: without a GPU there is only host memory. Set offload.host_budget.",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_fit_is_refused_with_its_numbers_and_the_key(offload, case, said):
    with pytest.raises(ConfigError) as caught:
        fits(offload, **case)
    assert str(caught.value).startswith(said)
