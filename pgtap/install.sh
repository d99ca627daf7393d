#!/bin/sh
# Puts pgTAP's SQL (pgtap.sql) and a pg_prove that runs into the folder $1; no server is installed.
# Takes those that PGTAP_SQL and PATH name, else Debian's packages, unpacked in place.
set -eu

target=$1
mkdir -p "$target"
target=$(cd "$target" && pwd)
log=$target/install.log
. "$(dirname "$0")/../tests/apt_lists.sh"

fail() {
  echo "pgTAP: $1" >&2
  exit 1
}

quietly() {
  "$@" > "$log" 2>&1 || { cat "$log" >&2; return 1; }
}

has_tap() {
  perl -MTAP::Harness -e 1 2> /dev/null
}

# The newest of those that the package lists know, one for each major version of PostgreSQL.
pgtap_package() {
  apt-cache search --names-only '^postgresql-[0-9]+-pgtap$' | cut -d ' ' -f 1 |
    sort -t - -k 2 -n | tail -n 1
}

download() {
  package=$(pgtap_package)
  [ -n "$package" ] || return 1
  (cd "$target/packages" &&
    apt-get download "$package" libtap-parser-sourcehandler-pgtap-perl) > "$log" 2>&1
}

install_perl() {
  export DEBIAN_FRONTEND=noninteractive
  apt-get install -y --no-install-recommends perl > "$log" 2>&1
}

if [ -f "$target/pgtap.sql" ] && [ -x "$target/pg_prove" ] && has_tap; then
  exit 0
fi

if [ -n "${PGTAP_SQL:-}" ] && prove=$(command -v pg_prove); then
  [ -f "$PGTAP_SQL" ] || fail "PGTAP_SQL=$PGTAP_SQL is no file"
  ln -sf "$prove" "$target/pg_prove"
  cp "$PGTAP_SQL" "$target/pgtap.sql"
  exit 0
fi

command -v apt-get > /dev/null || fail "install pgTAP (https://pgtap.org) and pg_prove (CPAN's \
TAP::Parser::SourceHandler::pgTAP), then set PGTAP_SQL to the path of its pgtap.sql"

rm -rf "$target/packages"
mkdir -p "$target/packages"
download || { update_lists && download; } || { cat "$log" >&2; fail "cannot download its packages"; }
for package in "$target"/packages/*.deb; do
  quietly dpkg -x "$package" "$target/packages"
done

if ! has_tap; then
  [ "$(id -u)" = 0 ] || fail "perl has no TAP::Harness: install the package perl"
  install_perl || { update_lists && install_perl; } || { cat "$log" >&2; fail "cannot install perl"; }
fi

cat > "$target/pg_prove" << 'PROVE'
#!/bin/sh
packages=$(dirname "$0")/packages
PERL5LIB=$packages/usr/share/perl5 exec perl "$packages/usr/bin/pg_prove" "$@"
PROVE
chmod +x "$target/pg_prove"
cp "$target"/packages/usr/share/postgresql/*/extension/pgtap.sql "$target/pgtap.sql"
