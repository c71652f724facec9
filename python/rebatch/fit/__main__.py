"""python3 -m rebatch.fit"""

import signal
import sys

from rebatch.fit.command import main

signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as `head` ends others
sys.exit(main(sys.argv[1:]))
