// The same six problems for PoCL.
#define T 16
kernel void vectoradd(global const float *a, global const float *b, global float *c, int n) {
    int i = get_global_id(0);
    if (i < n) c[i] = a[i] + b[i];
}
kernel void saxpy(float a, global const float *x, global float *y, int n) {
    int i = get_global_id(0);
    if (i < n) y[i] = a * x[i] + y[i];
}
kernel void mandelbrot(global int *out, int w, int h, float x0, float y0, float dx, float dy, int limit) {
    int px = get_global_id(0), py = get_global_id(1);
    if (px >= w || py >= h) return;
    float cx = x0 + px * dx, cy = y0 + py * dy, x = 0, y = 0;
    int it = 0;
    while (it < limit && x * x + y * y <= 4.0f) {
        float t = x * x - y * y + cx;
        y = 2 * x * y + cy;
        x = t;
        ++it;
    }
    out[py * w + px] = it;
}
kernel __attribute__((reqd_work_group_size(T, T, 1))) void matmul(
    global const float *A, global const float *B, global float *C, int n) {
    local float As[T][T], Bs[T][T];
    int tx = get_local_id(0), ty = get_local_id(1), row = get_group_id(1) * T + ty, col = get_group_id(0) * T + tx;
    float acc = 0;
    for (int m = 0; m < n / T; ++m) {
        As[ty][tx] = A[row * n + m * T + tx];
        Bs[ty][tx] = B[(m * T + ty) * n + col];
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int k = 0; k < T; ++k) acc += As[ty][k] * Bs[k][tx];
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    C[row * n + col] = acc;
}
kernel void reduce(global const float *x, global float *out) {
    local float s[256];
    uint t = get_local_id(0);
    size_t i = get_group_id(0) * 512 + t;
    s[t] = x[i] + x[i + 256];
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint k = 128; k > 0; k >>= 1) {
        if (t < k) s[t] += s[t + k];
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    if (t == 0) out[get_group_id(0)] = s[0];
}
kernel void histogram(global const uchar *x, global uint *h, int n) {
    local uint s[256];
    for (int i = get_local_id(0); i < 256; i += get_local_size(0)) s[i] = 0;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = get_global_id(0); i < n; i += get_global_size(0)) atomic_inc(&s[x[i]]);
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = get_local_id(0); i < 256; i += get_local_size(0)) atomic_add(&h[i], s[i]);
}
