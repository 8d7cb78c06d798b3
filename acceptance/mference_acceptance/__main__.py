"""Write the records that ship with the gate: `python -m mference_acceptance NAME...`, run in a source checkout."""

import sys
from pathlib import Path

from mference_acceptance import accept, render

for name in sys.argv[1:]:
    print(render(accept(name, records_dir=Path(__file__).parent / "records")))  # noqa: T201
