#!/bin/sh
# Makes a folder of libraries that stand for those of an old glibc when a wheel is linked:
#
#     old_glibc.sh FOLDER PYTHON
#
# A library that is linked to this machine's glibc asks for its newest symbols, and loads on no older system. Linked with
# -L FOLDER it asks for those of the glibc below, the one that jaxlib's wheels ask for. The libraries are empty but for the
# symbols and their versions, which Zig knows of every glibc and writes when it links a program for one.
set -eu
folder=$1 python=$2
glibc=2.27 zig=0.17.1

rm -rf "$folder" && mkdir -p "$folder" && cd "$folder"
"$python" -m pip install -q --no-deps --target packages ziglang==$zig
echo 'int main(void) { return 0; }' > program.c
PYTHONPATH=packages ZIG_GLOBAL_CACHE_DIR=cache ZIG_LOCAL_CACHE_DIR=cache \
  "$python" -m ziglang cc -O2 -target "$(uname -m)-linux-gnu.$glibc" program.c -o program
cp cache/o/*/lib*.so.* cache/o/*/libc_nonshared.a .

# What libstdc++.a may ask for and this glibc does not have. Zero, "perhaps there are several threads", is always right.
cat > newer.c <<END
#define HIDDEN __attribute__((visibility("hidden")))
HIDDEN char __libc_single_threaded = 0;
unsigned long strtoul(const char*, char**, int);
HIDDEN unsigned long __isoc23_strtoul(const char* text, char** end, int base) { return strtoul(text, end, base); }
END
cc -fPIC -c newer.c && ar rs libc_nonshared.a newer.o

# Threads, and what loads libraries, are parts of libc in newer versions, so the linker is not told of them elsewhere.
echo 'GROUP(libc.so.6 libc_nonshared.a AS_NEEDED(libpthread.so.0 libdl.so.2 librt.so.1 libld.so.2))' > libc.so
ln -s libm.so.6 libm.so
rm -r packages cache program program.c
