"""Every case of the gate, what says most soonest first; names of families appear nowhere."""

from mference_acceptance.case import Case, case_of
from mference_acceptance.cases import (
    batches,
    calls,
    chat,
    contract,
    forced,
    half,
    installs,
    invariance,
    kernels,
    lengths,
    parity,
    refusals,
    rewinds,
    serving,
    ties,
)

CASES: tuple[Case, ...] = tuple(
    case_of(run)
    for run in (
        contract.hooks_answer,
        contract.pinned_archs,
        contract.arch_mutations,
        contract.config_mutations,
        ties.router_ties,
        chat.chat_renders,
        chat.control_text,
        chat.empty_content,
        calls.call_round_trips,
        calls.malformed_calls,
        calls.random_answers,
        forced.forced_calls,
        kernels.kernel_bars,
        parity.parity_float,
        parity.parity_quantised,
        parity.parity_install,
        half.half_precision_layers,
        invariance.chunk_sizes,
        lengths.prompt_lengths,
        invariance.slot_counts,
        batches.ragged_batches,
        batches.joining_timelines,
        rewinds.state_bytes,
        rewinds.snapshots_and_forks,
        rewinds.rewinding,
        serving.concurrent_requests,
        serving.prefix_reuse,
        refusals.too_few_slots,
        refusals.missing_tensors,
        installs.install_round_trip,
        refusals.damaged_installs,
    )
)
