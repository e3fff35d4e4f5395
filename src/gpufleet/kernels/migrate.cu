// What `gpufleet migrate` launches. Its image, migrate.fatbin, is made beside it with
//     gpufleet build migrate.cu -o migrate.fatbin
// and NVRTC 13.0, so that driver 580 takes its PTX.

extern "C" __global__ void countdown(int *out, int n)
{
    int i = threadIdx.x;
    if (i < n) out[i] = n - i;
}
