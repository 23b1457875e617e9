"""`python -m torch_audit run|compare`."""

import sys

from .command import main

sys.exit(main())
