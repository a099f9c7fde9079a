#!/usr/bin/env bash
# bash benchmarks/prose.sh [FOLDER]   a text of prose, from packages of Debian 12 (default: prose/)
#
# Kernel documentation, a handbook in five languages, and three dictionaries with definitions: text
# that, unlike the source code of `tiny`, seldom repeats itself. Then, for example:
#   python prepare_data.py tiny --source "files:prose/*.txt" --dedup exact --data_dir data/prose
# Needs a Debian or Ubuntu with apt; nothing is installed. Other versions of the packages give
# another text: the last line says which one it is.
set -euo pipefail
folder=$(realpath -m "${1:-prose}")
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
mkdir -p "$folder"
cd "$here"
apt-get download -qq linux-doc-6.1 debian-handbook dict-gcide dict-foldoc dict-jargon 2> /dev/null
for package in *.deb; do
  echo "$package"
  dpkg-deb -x "$package" .
done

find usr/share/doc/linux-doc-6.1/Documentation -name '*.rst.gz' | sort | while read -r file; do
  name=${file#usr/share/doc/linux-doc-6.1/Documentation/}
  gunzip -c "$file" > "$folder/kernel_$(echo "${name%.rst.gz}" | tr / _).txt"
done

python3 - "$folder" << 'END'
"""The text of the handbook's pages, without menus and tags."""
import html
import re
import sys
from pathlib import Path

folder = Path(sys.argv[1])
for language in ("en-US", "de-DE", "es-ES", "fr-FR", "pt-BR"):
    for page in sorted(Path("usr/share/doc/debian-handbook/html", language).glob("*.html")):
        body = re.sub(r"(?s)<(head|script|style)\b.*?</\1>", "", page.read_text())
        body = re.sub(r'(?s)<ul class="docnav".*?</ul>', "", body)
        body = re.sub(r"</(p|h\d|li|div|pre)>", "\n\n", body)
        text = html.unescape(re.sub(r"<[^>]*>", "", body))
        text = re.sub(r"[ \t]+", " ", re.sub(r"\s*\n\s*\n\s*", "\n\n", text)).strip()
        (folder / f"handbook_{language}_{page.stem}.txt").write_text(text + "\n")
END

for name in gcide foldoc jargon; do
  file=$(find usr/share -name "$name.dict.dz")
  { gunzip -c -S .dz "$file" || true; } | head -c 12000000 | iconv -c -t utf-8 |
    split -C 200000 -d -a 4 --additional-suffix=.txt - "$folder/$name"_
done

find "$folder" -size -2 -delete # of a few hundred bytes: lists of links
echo "$(find "$folder" -type f | wc -l) files, $(cat "$folder"/*.txt | wc -c) bytes," \
  "sha256 $(cat "$folder"/*.txt | sha256sum | cut -c1-16)"
