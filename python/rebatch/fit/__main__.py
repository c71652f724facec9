"""python3 -m rebatch.fit"""

import sys

from rebatch.fit.command import main

sys.exit(main(sys.argv[1:]))
