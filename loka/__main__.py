from loka.cli import main

main()
