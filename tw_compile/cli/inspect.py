def inspect() -> None:
    pass
