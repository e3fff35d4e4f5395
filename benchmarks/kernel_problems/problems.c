/* The same six problems for gcc -O3 -march=native -fopenmp, each in the form that suits it best. */
#include <string.h>
#define T 16

void vectoradd(const float *restrict a, const float *restrict b, float *restrict c, long n) {
#pragma omp parallel for
    for (long i = 0; i < n; i++) c[i] = a[i] + b[i];
}

void saxpy(float a, const float *restrict x, float *restrict y, long n) {
#pragma omp parallel for
    for (long i = 0; i < n; i++) y[i] = a * x[i] + y[i];
}

void mandelbrot(int *out, int w, int h, float x0, float y0, float dx, float dy, int limit) {
#pragma omp parallel for schedule(dynamic, 8)
    for (int py = 0; py < h; py++)
        for (int px = 0; px < w; px++) {
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
}

void matmul(const float *restrict A, const float *restrict B, float *restrict C, int n) {
#pragma omp parallel for collapse(2)
    for (int by = 0; by < n / T; by++)
        for (int bx = 0; bx < n / T; bx++) {
            float As[T][T], Bs[T][T], acc[T][T];
            memset(acc, 0, sizeof acc);
            for (int m = 0; m < n / T; m++) {
                for (int ty = 0; ty < T; ty++)
                    for (int tx = 0; tx < T; tx++) {
                        As[ty][tx] = A[(by * T + ty) * n + m * T + tx];
                        Bs[ty][tx] = B[(m * T + ty) * n + bx * T + tx];
                    }
                for (int ty = 0; ty < T; ty++)
                    for (int k = 0; k < T; k++) {
                        float a = As[ty][k];
#pragma omp simd
                        for (int tx = 0; tx < T; tx++) acc[ty][tx] += a * Bs[k][tx];
                    }
            }
            for (int ty = 0; ty < T; ty++)
                for (int tx = 0; tx < T; tx++) C[(by * T + ty) * n + bx * T + tx] = acc[ty][tx];
        }
}

void reduce(const float *restrict x, float *restrict out, long blocks) {
#pragma omp parallel for
    for (long b = 0; b < blocks; b++) {
        float s[256];
        for (int t = 0; t < 256; t++) s[t] = x[b * 512 + t] + x[b * 512 + t + 256];
        for (int k = 128; k > 0; k >>= 1)
            for (int t = 0; t < k; t++) s[t] += s[t + k];
        out[b] = s[0];
    }
}

void histogram(const unsigned char *restrict x, unsigned *restrict h, long n) {
    memset(h, 0, 1024);
#pragma omp parallel
    {
        unsigned p[256];
        memset(p, 0, sizeof p);
#pragma omp for
        for (long i = 0; i < n; i++) p[x[i]]++;
#pragma omp critical
        for (int i = 0; i < 256; i++) h[i] += p[i];
    }
}
