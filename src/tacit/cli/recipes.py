"""`tacit recipes`: what can be trained by name."""

from __future__ import annotations

import typer


def command(
    name: str | None = typer.Argument(None, metavar="[NAME]", help="Show this recipe's TOML instead of the list."),
) -> None:
    """List the recipes that come with tacit, or show one.

    Save one to a file of your own (`tacit recipes mnist > my.toml`), edit it, and train with `tacit train my.toml`.
    """
    from tacit.training.recipe import Recipe, named_recipes

    if name is not None:
        typer.echo(Recipe.load(name).to_toml(), nl=False)
        return
    recipes = named_recipes()
    width = max(len(key) for key in recipes)
    for key, description in recipes.items():
        typer.echo(f"{key:<{width}}  {description}")
