"""The command line: flags in, exit status out. What is printed is made in report/."""
