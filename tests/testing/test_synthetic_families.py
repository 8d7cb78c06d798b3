"""Every installed family can be written at full size: the plan is complete, and a config.json is found."""

import pytest

from mference_core import plugins
from mference_core.testing.config_fit import fit_config
from mference_core.testing.synthetic import plan_synthetic


@pytest.mark.parametrize("name", plugins.installed())
def test_a_pinned_checkpoint_is_planned_and_described(name: str) -> None:
    family = plugins.load(name)
    for arch in family.contract.pinned:
        made = plan_synthetic(family, arch=arch)
        assert {entry.name for entry in made.outputs.index.entries} == set(made.plan.residents)
        assert set(made.checkpoint.experts) == set(made.plan.experts)
        assert made.forms.config is not None
        config = fit_config(made.forms.config, family.contract, arch)
        assert family.contract.accept(family.contract.from_config(config)) == arch
        for layer in made.checkpoint.experts:
            assert {made.forms.stack(role, layer, made.plan) for role in ("gate", "up", "down")}
