#!/bin/sh
# Puts CUDA 12's nvcc together in a folder, as much of it as compiling takes, without being root:
#
#     fetch_cuda12.sh FOLDER PYTHON
#
# A library that CUDA 12 built works beside jax[cuda12] and jax[cuda13], one of CUDA 13 wants a driver of CUDA 13. No
# package on PyPI has CUDA 12's nvcc: nvidia-cuda-nvcc-cu12 has ptxas and headers, and not the compiler itself. Debian 13
# has that of CUDA 12.4, and the static runtime library, in its section non-free. It is older than sm_100 and sm_120. The
# headers are those of the PyPI packages, and so is ptxas, which writes the machine code: the last of CUDA 12. Neither
# Debian's own headers nor anything else is installed.
set -eu
folder=$1 python=$2
version=12.4.131 headers=12.4.127 ptxas=12.9.86

mkdir -p "$folder" && folder=$(cd "$folder" && pwd)
packages=$folder/packages newest=$folder/newest apt=$folder/apt
mkdir -p "$packages" "$newest" "$apt/lists/partial" "$apt/archives/partial" "$folder/bin" "$folder/lib64"

# From the mirror that this machine uses, without touching its list of sources.
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -m 1 '/debian/$')
keys=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keys] $mirror trixie non-free" > "$apt/sources.list"
get() {
  apt-get -q -o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=/dev/null \
    -o Dir::State::lists="$apt/lists" -o Dir::Cache="$apt" -o APT::Sandbox::User=root "$@"
}
get update
(cd "$apt" && get download nvidia-cuda-toolkit nvidia-cuda-dev && dpkg -x nvidia-cuda-toolkit_*.deb debian)
"$python" -m pip install -q --no-deps --upgrade --target "$packages" nvidia-cuda-nvcc-cu12==$version \
  nvidia-cuda-runtime-cu12==$headers nvidia-cuda-cccl-cu12==$headers.post1
"$python" -m pip install -q --no-deps --upgrade --target "$newest" nvidia-cuda-nvcc-cu12==$ptxas

# nvcc finds the rest by its own place and by nvcc.profile beside it.
debian=$apt/debian/usr
cp -r "$debian"/lib/nvidia-cuda-toolkit/bin/cicc "$debian"/lib/nvidia-cuda-toolkit/bin/crt "$folder/bin"
cp "$debian"/bin/cudafe++ "$debian"/bin/fatbinary "$debian"/bin/nvlink "$folder/bin"
cp "$newest/nvidia/cuda_nvcc/bin/ptxas" "$folder/bin"
chmod +x "$folder/bin/ptxas"
ln -sfn packages/nvidia/cuda_nvcc/nvvm "$folder/nvvm"
nvidia='$(TOP)/packages/nvidia'
cat > "$folder/bin/nvcc.profile" <<END
TOP = \$(_HERE_)/..
CICC_PATH = \$(_HERE_)
NVVMIR_LIBRARY_DIR = \$(TOP)/nvvm/libdevice
PATH += \$(_HERE_):
INCLUDES += "-I$nvidia/cuda_runtime/include" "-I$nvidia/cuda_nvcc/include" "-I$nvidia/cuda_cccl/include" \$(_SPACE_)
LIBRARIES =+ \$(_SPACE_) "-L\$(TOP)/lib64"
END
# The package that has the static library of the runtime is large, and is read only as far as that.
libraries=./usr/lib/$(dpkg-architecture -q DEB_HOST_MULTIARCH 2>/dev/null || echo x86_64-linux-gnu)
{ dpkg-deb --fsys-tarfile "$apt"/nvidia-cuda-dev_*.deb 2>/dev/null || true; } |
  tar -x --to-stdout --occurrence=1 -f - "$libraries/libcudart_static.a" > "$folder/lib64/libcudart_static.a"
ar rc "$folder/lib64/libcudadevrt.a"
cp "$debian/lib/nvidia-cuda-toolkit/bin/nvcc" "$folder/bin/nvcc"
rm -r "$apt" "$newest"
