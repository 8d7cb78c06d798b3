"""What the engine and the scheduler have to tell, as plain numbers."""

from collections.abc import Mapping

import mlx.core as mx

from mference_core.engine import Engine
from mference_core.scheduler.scheduler import Scheduler


def engine_figures(engine: Engine, scheduler: Scheduler) -> Mapping[str, float]:
    """Return counts, bytes and seconds by name; may be called from any thread."""
    stats, load = engine.stats, scheduler.load()
    return {
        "expert_hits_total": stats.hits,
        "expert_misses_total": stats.misses,
        "expert_hit_rate": 1.0 if engine.memory.resident else stats.hit_rate,
        "expert_bytes_read_total": stats.bytes_read,
        "expert_stall_seconds_total": stats.stall_seconds,
        "array_bytes": mx.get_active_memory(),
        "array_cache_bytes": mx.get_cache_memory(),
        "array_peak_bytes": mx.get_peak_memory(),
        "state_bytes": load.state_bytes,
        "scheduler_waiting": load.waiting,
        "scheduler_prefilling": load.prefilling,
        "scheduler_decoding": load.decoding,
        "scheduler_decode_steps_total": load.decode_steps,
    }
