"""Every case of the gate, cheapest first; names of families appear nowhere."""

from mference_acceptance.case import Case, case_of
from mference_acceptance.cases import batches, contract, half, invariance, parity, refusals, rewinds, ties

CASES: tuple[Case, ...] = tuple(
    case_of(run)
    for run in (
        contract.hooks_answer,
        contract.pinned_archs,
        contract.arch_mutations,
        contract.config_mutations,
        ties.router_ties,
        parity.parity_float,
        parity.parity_quantised,
        parity.parity_install,
        half.half_precision_layers,
        invariance.chunk_sizes,
        invariance.slot_counts,
        batches.ragged_batches,
        rewinds.state_bytes,
        rewinds.snapshots_and_forks,
        rewinds.rewinding,
        refusals.too_few_slots,
        refusals.missing_tensors,
        refusals.damaged_installs,
    )
)
