extern "C" __global__ void fill(int *p, int v){ p[threadIdx.x] = v; }
extern "C" __global__ void oob(int *p){ p[threadIdx.x + (1ll<<38)] = 1; }
extern "C" __global__ void trap(int *p){ asm volatile("trap;"); }
extern "C" __global__ void misaligned(char *p){ *(int*)(p+1) = 1; }
extern "C" __global__ void spin(long long n){ long long t=clock64(); while(clock64()-t<n); }
extern "C" __global__ void nullw(int *p){ *(volatile int*)0 = 1; }
extern "C" __global__ void three(int a, double b, int *p){ p[0]=a; p[1]=(int)b; }
