#!/bin/sh
# Puts CUDA 12's nvcc together in a folder, as much of it as compiling takes, without being root:
#
#     fetch_cuda12.sh FOLDER PYTHON
#
# jaxsoft works beside jax[cuda12] if it is built with CUDA 12. No package on PyPI has that nvcc: nvidia-cuda-nvcc-cu12
# has ptxas and headers, and not the compiler itself. Debian 13 has it, in its section non-free. The headers and the
# runtime library are those of the PyPI packages. Neither Debian's own headers nor anything else is installed.
set -eu
folder=$1 python=$2
version=12.4.131 headers=12.4.127

mkdir -p "$folder" && folder=$(cd "$folder" && pwd)
packages=$folder/packages apt=$folder/apt
mkdir -p "$packages" "$apt/lists/partial" "$apt/archives/partial" "$folder/bin" "$folder/lib64"

# From the mirror that this machine uses, without touching its list of sources.
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -m 1 '/debian/$')
keys=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keys] $mirror trixie non-free" > "$apt/sources.list"
get() {
  apt-get -q -o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=/dev/null \
    -o Dir::State::lists="$apt/lists" -o Dir::Cache="$apt" -o APT::Sandbox::User=root "$@"
}
get update
(cd "$apt" && get download nvidia-cuda-toolkit && dpkg -x nvidia-cuda-toolkit_*.deb debian)
"$python" -m pip install -q --no-deps --upgrade --target "$packages" nvidia-cuda-nvcc-cu12==$version \
  nvidia-cuda-runtime-cu12==$headers nvidia-cuda-cccl-cu12==$headers.post1

# nvcc finds the rest by its own place and by nvcc.profile beside it.
debian=$apt/debian/usr
cp -r "$debian"/lib/nvidia-cuda-toolkit/bin/cicc "$debian"/lib/nvidia-cuda-toolkit/bin/crt "$folder/bin"
cp "$debian"/bin/cudafe++ "$debian"/bin/fatbinary "$debian"/bin/nvlink "$debian"/bin/ptxas "$folder/bin"
nvidia=$packages/nvidia
ln -sfn "$nvidia/cuda_nvcc/nvvm" "$folder/nvvm"
cat > "$folder/bin/nvcc.profile" <<END
TOP = \$(_HERE_)/..
CICC_PATH = \$(_HERE_)
NVVMIR_LIBRARY_DIR = \$(TOP)/nvvm/libdevice
PATH += \$(_HERE_):
INCLUDES += "-I$nvidia/cuda_runtime/include" "-I$nvidia/cuda_nvcc/include" "-I$nvidia/cuda_cccl/include" \$(_SPACE_)
LIBRARIES =+ \$(_SPACE_) "-L$folder/lib64"
END
# The static library of the runtime is in no such package: here its name stands for the shared one.
echo "INPUT($nvidia/cuda_runtime/lib/libcudart.so.12)" > "$folder/lib64/libcudart_static.a"
ar rc "$folder/lib64/libcudadevrt.a"
cp "$debian/lib/nvidia-cuda-toolkit/bin/nvcc" "$folder/bin/nvcc"
rm -r "$apt"
