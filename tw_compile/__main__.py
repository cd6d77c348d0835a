from tw_compile.cli import main

main()
