import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # probed, which test files of this folder share
