"""`python -m responses_kit` is the command line."""

if __name__ == "__main__":
    from responses_kit.cli import main

    main()
