"""What the engine and the scheduler have to tell, as plain numbers."""

from collections.abc import Mapping

import mlx.core as mx

from mference_core.scheduler.scheduler import Scheduler
from mference_core.server.shelf import Shelf


def shelf_figures(shelf: Shelf) -> Mapping[str, float]:
    """Return counts, bytes and seconds by name of the model in memory; may be called from any thread."""
    scheduler = shelf.served.scheduler if shelf.served is not None else None
    if not isinstance(scheduler, Scheduler):
        return {}
    engine = scheduler.engine
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
        "prefix_cache_bytes": load.cache.nbytes,
        "prefix_cache_disk_bytes": load.cache.disk_bytes,
        "prefix_cache_hits_total": load.cache.restored,
        "prefix_cache_tokens_total": load.cache.restored_tokens,
    }
