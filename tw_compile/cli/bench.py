import typer

app = typer.Typer()


@app.command()
def passes() -> None:
    pass

@app.callback()
def cb() -> None:
    pass
