#!/bin/sh
# Puts a pgbouncer that runs into the folder $1; no service is installed or started.
# Takes the one that PATH or /usr/sbin has, else Debian's package, unpacked in place.
set -eu

target=$1
mkdir -p "$target"
target=$(cd "$target" && pwd)
packages=$target/packages
log=$target/install.log
. "$(dirname "$0")/apt_lists.sh"

fail() {
  echo "PgBouncer: $1" >&2
  exit 1
}

unpack() {
  (cd "$packages" && apt-get download "$@") > "$log" 2>&1 || return 1
  for package in "$packages"/*.deb; do
    dpkg -x "$package" "$packages" > "$log" 2>&1 || return 1
  done
}

# Where the unpacked libraries lie, as LD_LIBRARY_PATH wants it.
libraries() {
  find "$packages" -name '*.so.*' -exec dirname {} + | sort -u | paste -s -d : -
}

lacks_libraries() {
  LD_LIBRARY_PATH=$(libraries) ldd "$packages/usr/sbin/pgbouncer" | grep 'not found' > "$log"
}

# Those that it names itself, but the C library, which a system has.
library_packages() {
  apt-cache depends pgbouncer | sed -n 's/^[ |]*Depends: \(lib.*\)/\1/p' | grep -v '^libc6'
}

if program=$(PATH=$PATH:/usr/sbin command -v pgbouncer); then
  printf '#!/bin/sh\nexec "%s" "$@"\n' "$program" > "$target/pgbouncer"
  chmod +x "$target/pgbouncer"
  exit 0
fi

command -v apt-get > /dev/null || fail "install it (https://www.pgbouncer.org) where PATH finds it"

rm -rf "$packages"
mkdir -p "$packages"
unpack pgbouncer || { update_lists && unpack pgbouncer; } ||
  { cat "$log" >&2; fail "cannot download its package"; }
if lacks_libraries; then
  # shellcheck disable=SC2046 # one word a package
  unpack $(library_packages) || { cat "$log" >&2; fail "cannot download its libraries"; }
  ! lacks_libraries || { cat "$log" >&2; fail "it lacks libraries: install the package pgbouncer"; }
fi

cat > "$target/pgbouncer" << PROGRAM
#!/bin/sh
LD_LIBRARY_PATH=$(libraries) exec "$packages/usr/sbin/pgbouncer" "\$@"
PROGRAM
chmod +x "$target/pgbouncer"
