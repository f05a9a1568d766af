from extproc.cli import main

main(prog_name="kvcar")
