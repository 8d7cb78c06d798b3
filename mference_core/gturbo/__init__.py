"""The .gturbo directory: resident index, layer layout, receipt, verified reading (gturbo-format 1 to 11)."""

PAGE_BYTES = 16384
# Hosts with 4 KiB pages map a stride of any multiple of this; the format's own writer always uses PAGE_BYTES.
MIN_PAGE_BYTES = 4096


def page_up(size: int) -> int:
    """Round a byte count up to the format page."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES
