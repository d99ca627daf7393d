#!/bin/sh
# Puts PostgreSQL's programs with plpgsql_check into $1/bin; no server is installed or started.
# Its servers profile every PL/pgSQL function that is called. Takes Debian's package, unpacked in
# place, for the newest major version that the package lists know; PYTHON has pip.
set -eu

target=$1
mkdir -p "$target"
target=$(cd "$target" && pwd)
packages=$target/check
log=$target/install_check.log
. "$(dirname "$0")/apt_lists.sh"

fail() {
  echo "plpgsql_check: $1" >&2
  exit 1
}

newest() {
  apt-cache search --names-only '^postgresql-[0-9]+-plpgsql-check$' | cut -d ' ' -f 1 |
    sort -t - -k 2 -n | tail -n 1
}

download() {
  package=$(newest)
  [ -n "$package" ] || return 1
  (cd "$packages" && apt-get download "$package" && dpkg -x ./*.deb .) > "$log" 2>&1
}

command -v apt-get > /dev/null || fail "needs Debian's package: there is no apt-get here"

rm -rf "$packages"
mkdir "$packages"
download || { update_lists && download; } || { cat "$log" >&2; fail "cannot download its package"; }
major=${package#postgresql-}
major=${major%%-*}
sh "$(dirname "$0")/install_postgresql.sh" "$target" "$major"
[ -d "$target/lib" ] || fail "PostgreSQL $major is the system's, which stays as it is"

cp "$packages/usr/lib/postgresql/$major/lib/plpgsql_check.so" "$target/lib"
cp "$packages/usr/share/postgresql/$major/extension/plpgsql_check"* "$target/share/extension"
# initdb makes postgresql.conf from it.
cat >> "$target/share/postgresql.conf.sample" << 'SETTINGS'
shared_preload_libraries = 'plpgsql_check'
plpgsql_check.profiler = on
SETTINGS
