"""Add the notes in benchmarks/notes to the site, beside the page of benchmarks that links to them."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the files of the site with the notes, under the paths that they have in the project."""
    for path in sorted((ROOT / "benchmarks" / "notes").glob("*.md")):
        files.append(
            File(
                path.relative_to(ROOT).as_posix(),
                src_dir=str(ROOT),
                dest_dir=config.site_dir,
                use_directory_urls=config.use_directory_urls,
            )
        )
    return files
