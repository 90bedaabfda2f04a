"""Options and arguments that several commands share."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..models import BACKBONES


def out_option(default: str) -> Any:
    """Returns the option that names the folder to write."""
    return typer.Option("--out", metavar="DIR", help=f"default {default}")


SOURCE_HELP = "a preset's name or a TOML file; default digits, or folder with --data"
BACKBONE_HELP = f"{', '.join(BACKBONES)}, torchvision:NAME, timm:NAME, transformers:NAME or package.module:callable"
DATA_HELP = "your own: site/class/image.png, .npz or .csv"
Source = Annotated[str | None, typer.Argument(metavar="PRESET | FILE.toml", help=SOURCE_HELP)]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")]
Classes = Annotated[int, typer.Option(min=1, help="outputs of the head")]
Client = Annotated[str, typer.Option(help="whose personal model")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="section.key=value, repeatable")]
Methods = Annotated[str | None, typer.Option(metavar="A,B,C | all", help="default all")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda")]
NewDevice = Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda; default auto")]
Lanes = Annotated[str | None, typer.Option(metavar="auto | N", help="most lanes at once; auto: as many as fit")]
DataPath = Annotated[str | None, typer.Option("--data", metavar="PATH", help=DATA_HELP)]
