/* Launch kernels as fast as C does: convert the arguments, call the driver through its address, note it.
 *
 * Two types. A Launcher knows a kernel in one context and configuration: what its parameters take, where
 * their bytes go, and the grid and block. A Bound also knows the stream, and is called with nothing but
 * the values. Whatever is not usual (a closed stream, a lost driver, a capture, a wrong number of values,
 * an error of the driver) is left to the Python twin, which does all of it and knows the messages.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

enum { MOST_BYTES = 4096, MOST_PARAMETERS = 256 };

typedef int (*LaunchKernel)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                            unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                            void *stream, void **parameters, void **extra);

/* CU_LAUNCH_PARAM_* of cuda.h */
#define PARAM_END ((void *)0)
#define PARAM_BUFFER_POINTER ((void *)1)
#define PARAM_BUFFER_SIZE ((void *)2)

typedef struct {
    char code;    /* of `struct`: how what `convert` returns is stored; B H I Q f d s */
    char common;  /* the case that is converted here: i(nteger) f(loat) p(ointer) s(truct), or - for none */
    int offset, size;
    int64_t lowest, highest; /* of integers */
    double bound;            /* of floats: smaller by size than this */
    PyObject *convert;       /* (value, queue) -> what `code` stores */
} Parameter;

typedef struct {
    PyObject_HEAD
    LaunchKernel call;
    void *function;
    unsigned sizes[7]; /* grid, block, shared */
    int count;
    size_t bytes;
    Parameter *parameters;
    PyObject *buffer_type; /* DeviceBuffer */
} Launcher;

typedef struct {
    PyObject_HEAD
    Launcher *launcher;
    PyObject *queue, *context, *key, *driver;
    PyObject *numbers, *append, *configuration; /* of the log of launches */
    PyObject *twin;                             /* does the same in Python */
    void *stream;
    int packed;
} Bound;

/* Attribute names, made once. */
static PyObject *s_usable_in, *s_address, *s_uses, *s_closed, *s_is_lost, *s_graph, *s_context, *s_key;

static int fail_if_null(PyObject *object) { return object == NULL ? -1 : 0; }

/* Whether object.name is true; -1 with an exception. */
static int is_true(PyObject *object, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(object, name);
    if (value == NULL) return -1;
    int answer = PyObject_IsTrue(value);
    Py_DECREF(value);
    return answer;
}

/* ---- Converting one argument ------------------------------------------------------------------- */

static void store(unsigned char *to, uint64_t bits, int size)
{
    memcpy(to, &bits, size); /* little-endian, as every machine with a CUDA driver is */
}

static int store_integer(const Parameter *p, PyObject *value, unsigned char *to)
{
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow || number < p->lowest || number > p->highest) return 0;
    store(to, (uint64_t)number, p->size);
    return 1;
}

static int store_buffer(PyObject *value, PyObject *queue, PyObject *context, PyObject *key, unsigned char *to)
{
    PyObject *usable_in = PyObject_GetAttr(value, s_usable_in);
    if (usable_in == NULL) return -1;
    Py_DECREF(usable_in); /* compared only: the buffer, or who asks, holds it */
    if (usable_in != context) return 0;
    PyObject *address = PyObject_GetAttr(value, s_address);
    if (address == NULL) return -1;
    uint64_t bits = PyLong_AsUnsignedLongLong(address);
    Py_DECREF(address);
    if (bits == (uint64_t)-1 && PyErr_Occurred()) return -1;
    PyObject *uses = PyObject_GetAttr(value, s_uses);
    if (uses == NULL) return -1;
    int failed = PyObject_SetItem(uses, key, queue);
    Py_DECREF(uses);
    if (failed) return -1;
    store(to, bits, 8);
    return 1;
}

/* Return 1 if `value` was the parameter's common case and is stored, 0 if not, -1 with an exception. */
static int store_common(const Parameter *p, PyObject *value, const Launcher *launcher, PyObject *queue,
                        PyObject *context, PyObject *key, unsigned char *memory)
{
    unsigned char *to = memory + p->offset;
    if ((p->common == 'i' || p->common == 'p') && PyLong_CheckExact(value)) return store_integer(p, value, to);
    if (p->common == 'f' && PyFloat_CheckExact(value)) {
        double number = PyFloat_AsDouble(value);
        if (!(-p->bound < number && number < p->bound)) return 0;
        if (p->size == 8) {
            memcpy(to, &number, 8);
        } else {
            float single = (float)number;
            memcpy(to, &single, 4);
        }
        return 1;
    }
    if (p->common == 's' && PyBytes_CheckExact(value)) {
        if (PyBytes_Size(value) != p->size) return 0;
        memcpy(to, PyBytes_AsString(value), p->size);
        return 1;
    }
    if (p->common == 'p' && value == Py_None) {
        store(to, 0, 8);
        return 1;
    }
    if (p->common != 'p' || (PyObject *)Py_TYPE(value) != launcher->buffer_type) return 0;
    return store_buffer(value, queue, context, key, to);
}

static int store_converted(const Parameter *p, PyObject *value, PyObject *queue, unsigned char *memory)
{
    PyObject *found = PyObject_CallFunctionObjArgs(p->convert, value, queue, NULL);
    if (found == NULL) return -1;
    unsigned char *to = memory + p->offset;
    int answer = 0;
    if (p->code == 's') {
        if (PyBytes_Check(found) && PyBytes_Size(found) == p->size) {
            memcpy(to, PyBytes_AsString(found), p->size);
        } else {
            PyErr_Format(PyExc_SystemError, "a conversion returned no %d bytes", p->size);
            answer = -1;
        }
    } else if (p->code == 'f' || p->code == 'd') {
        double number = PyFloat_AsDouble(found);
        float single = (float)number;
        if (number == -1.0 && PyErr_Occurred()) answer = -1;
        else memcpy(to, p->code == 'f' ? (void *)&single : (void *)&number, p->size);
    } else {
        uint64_t bits = PyLong_AsUnsignedLongLong(found);
        if (bits == (uint64_t)-1 && PyErr_Occurred()) answer = -1;
        else store(to, bits, p->size);
    }
    Py_DECREF(found);
    return answer;
}

/* `arguments` is a tuple of launcher->count values. Returns 0, or -1 with an exception, or 1 for a pointer
 * that is not the common case, where `convert_pointers` is 0. */
static int pack(const Launcher *launcher, PyObject *arguments, PyObject *queue, PyObject *context,
                PyObject *key, int convert_pointers, unsigned char *memory)
{
    for (int i = 0; i < launcher->count; i++) {
        const Parameter *p = &launcher->parameters[i];
        PyObject *value = PyTuple_GetItem(arguments, i);
        int done = store_common(p, value, launcher, queue, context, key, memory);
        if (done < 0) return -1;
        if (!done && p->common == 'p' && !convert_pointers) return 1;
        if (!done && store_converted(p, value, queue, memory)) return -1;
    }
    return 0;
}

/* ---- Calling the driver ------------------------------------------------------------------------ */

/* Returns the driver's CUresult. The GIL is released: a launch waits while the stream's queue is full,
 * which may last until another Python thread lets a kernel end. */
static int start(const Launcher *launcher, void *stream, int packed, unsigned char *memory)
{
    size_t bytes = launcher->bytes;
    void *extra[] = {PARAM_BUFFER_POINTER, memory, PARAM_BUFFER_SIZE, &bytes, PARAM_END};
    void *pointers[MOST_PARAMETERS];
    void **as_pointers = NULL, **as_extra = NULL;
    if (launcher->count && packed) {
        as_extra = extra;
    } else if (launcher->count) {
        for (int i = 0; i < launcher->count; i++) pointers[i] = memory + launcher->parameters[i].offset;
        as_pointers = pointers;
    }
    const unsigned *n = launcher->sizes;
    int result;
    Py_BEGIN_ALLOW_THREADS
    result = launcher->call(launcher->function, n[0], n[1], n[2], n[3], n[4], n[5], n[6], stream,
                            as_pointers, as_extra);
    Py_END_ALLOW_THREADS
    return result;
}

/* ---- Launcher ---------------------------------------------------------------------------------- */

static int read_parameter(Parameter *p, PyObject *from)
{
    const char *code, *common;
    PyObject *convert;
    if (!PyArg_ParseTuple(from, "ssiiLLdO", &code, &common, &p->offset, &p->size, &p->lowest, &p->highest,
                          &p->bound, &convert)) {
        return -1;
    }
    p->code = code[0];
    p->common = common[0];
    if (p->offset < 0 || p->size < 1 || p->size > MOST_BYTES || p->offset > MOST_BYTES - p->size) {
        PyErr_SetString(PyExc_ValueError, "a parameter beyond the largest buffer");
        return -1;
    }
    if (p->code != 's' && p->size > 8) {
        PyErr_SetString(PyExc_ValueError, "a number of more than 8 bytes");
        return -1;
    }
    Py_INCREF(convert);
    p->convert = convert;
    return 0;
}

static PyObject *launcher_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    unsigned long long call, function;
    unsigned n[7];
    PyObject *parameters, *buffer_type;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "KK(IIIIIII)O!O", &call, &function, &n[0], &n[1], &n[2], &n[3], &n[4], &n[5],
                          &n[6], &PyTuple_Type, &parameters, &buffer_type)) {
        return NULL;
    }
    Py_ssize_t count = PyTuple_Size(parameters);
    if (count > MOST_PARAMETERS) {
        PyErr_SetString(PyExc_ValueError, "more parameters than a launch in C takes");
        return NULL;
    }
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Launcher *self = (Launcher *)alloc(type, 0);
    if (self == NULL) return NULL;
    self->parameters = PyMem_Calloc(count ? count : 1, sizeof(Parameter));
    if (self->parameters == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    self->call = (LaunchKernel)(uintptr_t)call;
    self->function = (void *)(uintptr_t)function;
    memcpy(self->sizes, n, sizeof n);
    Py_INCREF(buffer_type);
    self->buffer_type = buffer_type;
    for (Py_ssize_t i = 0; i < count; i++) {
        Parameter *p = &self->parameters[i];
        if (read_parameter(p, PyTuple_GetItem(parameters, i))) {
            Py_DECREF(self);
            return NULL;
        }
        self->count++;
        self->bytes = p->offset + p->size; /* up to the end of the last, without padding behind it */
    }
    return (PyObject *)self;
}

static void free_self(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static void launcher_dealloc(PyObject *object)
{
    Launcher *self = (Launcher *)object;
    for (int i = 0; i < self->count; i++) Py_XDECREF(self->parameters[i].convert);
    PyMem_Free(self->parameters);
    Py_XDECREF(self->buffer_type);
    free_self(object);
}

PyDoc_STRVAR(launch_doc, "launch(queue, packed, arguments)\n\n"
                         "Start the kernel with a tuple of values, one for each parameter; return the CUresult "
                         "as an int.");

static PyObject *launcher_launch(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    Launcher *self = (Launcher *)object;
    if (nargs != 3 || !PyTuple_Check(args[2]) || PyTuple_Size(args[2]) != self->count) {
        PyErr_SetString(PyExc_TypeError, "launch takes a queue, whether to pack, and a tuple of all values");
        return NULL;
    }
    PyObject *queue = args[0], *answer = NULL;
    PyObject *context = PyObject_GetAttr(queue, s_context), *key = PyObject_GetAttr(queue, s_key);
    PyObject *address = PyObject_GetAttr(queue, s_address);
    unsigned char memory[MOST_BYTES];
    if (context != NULL && key != NULL && address != NULL) {
        int packed = PyObject_IsTrue(args[1]);
        void *stream = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(address);
        if (packed >= 0 && !PyErr_Occurred() && !pack(self, args[2], queue, context, key, 1, memory)) {
            answer = PyLong_FromLong(start(self, stream, packed, memory));
        }
    }
    Py_XDECREF(context);
    Py_XDECREF(key);
    Py_XDECREF(address);
    return answer;
}

static PyMethodDef launcher_methods[] = {
    {"launch", (PyCFunction)(void (*)(void))launcher_launch, METH_FASTCALL, launch_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot launcher_slots[] = {
    {Py_tp_doc, "A kernel in one context, with its grid and block."},
    {Py_tp_new, launcher_new},
    {Py_tp_dealloc, launcher_dealloc},
    {Py_tp_methods, launcher_methods},
    {0, NULL},
};

static PyType_Spec launcher_spec = {
    "gpufleet._native.Launcher", sizeof(Launcher), 0, Py_TPFLAGS_DEFAULT, launcher_slots,
};

/* ---- Bound ------------------------------------------------------------------------------------- */

static PyTypeObject *launcher_type;

static PyObject *bound_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *launcher, *queue, *context, *key, *driver, *numbers, *append, *configuration, *twin;
    unsigned long long stream;
    int packed;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!OOOOKpOOOO", launcher_type, &launcher, &queue, &context, &key, &driver,
                          &stream, &packed, &numbers, &append, &configuration, &twin)) {
        return NULL;
    }
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Bound *self = (Bound *)alloc(type, 0);
    if (self == NULL) return NULL;
    self->launcher = (Launcher *)launcher;
    self->queue = queue;
    self->context = context;
    self->key = key;
    self->driver = driver;
    self->numbers = numbers;
    self->append = append;
    self->configuration = configuration;
    self->twin = twin;
    Py_INCREF(launcher);
    Py_INCREF(queue);
    Py_INCREF(context);
    Py_INCREF(key);
    Py_INCREF(driver);
    Py_INCREF(numbers);
    Py_INCREF(append);
    Py_INCREF(configuration);
    Py_INCREF(twin);
    self->stream = (void *)(uintptr_t)stream;
    self->packed = packed;
    return (PyObject *)self;
}

/* A cycle, by an attribute of the kernel, say, is broken where that attribute is: no tp_clear is needed. */
static int bound_traverse(PyObject *object, visitproc visit, void *arg)
{
    Bound *self = (Bound *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->launcher);
    Py_VISIT(self->queue);
    Py_VISIT(self->context);
    Py_VISIT(self->key);
    Py_VISIT(self->driver);
    Py_VISIT(self->numbers);
    Py_VISIT(self->append);
    Py_VISIT(self->configuration);
    Py_VISIT(self->twin);
    return 0;
}

static void bound_dealloc(PyObject *object)
{
    Bound *self = (Bound *)object;
    PyObject_GC_UnTrack(object);
    Py_XDECREF(self->launcher);
    Py_XDECREF(self->queue);
    Py_XDECREF(self->context);
    Py_XDECREF(self->key);
    Py_XDECREF(self->driver);
    Py_XDECREF(self->numbers);
    Py_XDECREF(self->append);
    Py_XDECREF(self->configuration);
    Py_XDECREF(self->twin);
    free_self(object);
}

/* Whether the Python twin is needed: 1, 0, or -1 with an exception. */
static int is_unusual(Bound *self)
{
    int lost = is_true(self->driver, s_is_lost);
    if (lost) return lost;
    int closed = is_true(self->queue, s_closed);
    if (closed) return closed;
    closed = is_true(self->context, s_closed);
    if (closed) return closed;
    PyObject *graph = PyObject_GetAttr(self->queue, s_graph);
    if (graph == NULL) return -1;
    Py_DECREF(graph);
    return graph != Py_None;
}

/* Note the launch among those that are not known to be complete. */
static int note(Bound *self)
{
    PyObject *number = PyIter_Next(self->numbers);
    if (number == NULL) return -1;
    PyObject *entry = PyTuple_Pack(2, number, self->configuration);
    Py_DECREF(number);
    if (entry == NULL) return -1;
    PyObject *done = PyObject_CallFunctionObjArgs(self->append, entry, NULL);
    Py_DECREF(entry);
    Py_XDECREF(done);
    return fail_if_null(done);
}

static PyObject *bound_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    Bound *self = (Bound *)object;
    Launcher *launcher = self->launcher;
    if (kwargs != NULL && PyDict_Size(kwargs)) { /* the twin would take another stream */
        PyErr_SetString(PyExc_TypeError, "a bound kernel takes no keyword arguments, only values");
        return NULL;
    }
    int unusual = PyTuple_Size(args) != launcher->count ? 1 : is_unusual(self);
    if (unusual < 0) return NULL;
    if (unusual) return PyObject_Call(self->twin, args, NULL);
    unsigned char memory[MOST_BYTES];
    /* Another library's memory is not only converted, but kept and waited for: the twin knows how. */
    int failed = pack(launcher, args, self->queue, self->context, self->key, 0, memory);
    if (failed < 0) return NULL;
    if (failed) return PyObject_Call(self->twin, args, NULL);
    /* A launch that fails has started nothing: the twin tries again, and says what is wrong. */
    if (start(launcher, self->stream, self->packed, memory)) return PyObject_Call(self->twin, args, NULL);
    if (note(self)) return NULL;
    Py_RETURN_NONE;
}

static PyType_Slot bound_slots[] = {
    {Py_tp_doc, "A kernel of which all is fixed but the values of its parameters."},
    {Py_tp_new, bound_new},
    {Py_tp_dealloc, bound_dealloc},
    {Py_tp_traverse, bound_traverse},
    {Py_tp_call, bound_call},
    {0, NULL},
};

static PyType_Spec bound_spec = {
    "gpufleet._native.Bound", sizeof(Bound), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    bound_slots,
};

/* ---- The module -------------------------------------------------------------------------------- */

static int intern_names(void)
{
    struct {
        PyObject **to;
        const char *text;
    } names[] = {
        {&s_usable_in, "usable_in"}, {&s_address, "address"}, {&s_uses, "uses"},       {&s_closed, "_closed"},
        {&s_is_lost, "is_lost"},     {&s_graph, "graph"},     {&s_context, "context"}, {&s_key, "key"},
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        *names[i].to = PyUnicode_InternFromString(names[i].text);
        if (*names[i].to == NULL) return -1;
    }
    return 0;
}

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "_native", "What gpufleet does in C where it can.", -1, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void)
{
    if (intern_names()) return NULL;
    PyObject *module = PyModule_Create(&module_definition);
    if (module == NULL) return NULL;
    launcher_type = (PyTypeObject *)PyType_FromSpec(&launcher_spec);
    PyObject *bound_type = PyType_FromSpec(&bound_spec);
    if (launcher_type == NULL || bound_type == NULL) return NULL;
    Py_INCREF(launcher_type);
    if (PyModule_AddObject(module, "Launcher", (PyObject *)launcher_type)) return NULL;
    if (PyModule_AddObject(module, "Bound", bound_type)) return NULL;
    PyModule_AddIntConstant(module, "MOST_BYTES", MOST_BYTES);
    PyModule_AddIntConstant(module, "MOST_PARAMETERS", MOST_PARAMETERS);
    return module;
}
