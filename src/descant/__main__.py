"""python -m descant"""

from descant.cli import main

main()
