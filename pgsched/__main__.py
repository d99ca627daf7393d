from pgsched.cli import main

main()
